"""The Trainer subclass trains privately, resumes to the same bits, and refuses what it must."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shuffled_dpsgd.errors import BudgetExhaustedError, CheckpointError, InvalidArgumentError
from shuffled_dpsgd.integrations import PrivacyArguments
from shuffled_dpsgd.training.budget import BudgetFile
from shuffled_dpsgd.training.saved_card import read_card

transformers = pytest.importorskip("transformers")

NUM_RECORDS = 24


def tiny_bert(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=12,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def records(num_records: int = NUM_RECORDS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (num_records, 8), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 8, "labels": row[0] % 2} for row in ids]


def arguments(output: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**(settings | changes))


def privacy(**changes: Any) -> PrivacyArguments:
    return PrivacyArguments(**({"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 0} | changes))


def build(output: Path, *, model: Any = None, data: Any = None, **options: Any) -> Any:
    from shuffled_dpsgd.integrations import ShuffledDPTrainer

    changes = options.pop("arguments", {})
    return ShuffledDPTrainer(
        model=tiny_bert() if model is None else model,
        args=arguments(output, **changes),
        train_dataset=records() if data is None else data,
        privacy=options.pop("privacy", privacy()),
        **options,
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_trains_the_planned_steps_and_writes_the_card(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    before = weights(trainer)
    output = trainer.train()
    assert output.global_step == trainer.private.plan.num_steps == 6
    assert trainer.private.plan.expected_batch_size == 8
    assert trainer.private.ledger.spent == 6
    after = weights(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    readme = (tmp_path / "README.md").read_text()
    card = json.loads((tmp_path / "privacy_card.json").read_text())
    assert str(trainer.card()) in readme
    assert card["certified"]["kind"] == "proven"
    assert card["shuffles_verified"] == 5
    assert card["certified"]["epsilon"] == trainer.card().certified.epsilon
    assert read_card(tmp_path) == trainer.card()
    assert "certified ε · proven" in (tmp_path / "privacy_card.html").read_text()


def test_units_are_drawn_by_the_column_that_names_them(tmp_path: Path) -> None:
    owned = [row | {"owner": index // 3} for index, row in enumerate(records())]
    wanted = privacy(unit="owner", records_per_unit=2, expected_batch_size=4)
    trainer = build(tmp_path, data=owned, privacy=wanted, arguments={"max_steps": 2})
    trainer.train()
    plan, card = trainer.private.plan, trainer.card()
    assert plan.dataset_size == math.ceil(NUM_RECORDS / 3)
    assert plan.num_steps == trainer.private.ledger.spent == 2
    assert card.subject["unit"].startswith("one owner: all of its records together")
    with pytest.raises(InvalidArgumentError, match="a column of the data"):
        build(tmp_path / "b", privacy=wanted).train()


def test_two_trainers_on_one_budget(tmp_path: Path) -> None:
    file = BudgetFile(tmp_path / "b.json")
    file.create(delta=1e-5, epsilon=None, adjacency="add-remove")
    for number in (1, 2):
        trainer = build(
            tmp_path / f"run{number}",
            privacy=privacy(budget=str(file.path), noise_seed=None),
        )
        trainer.train()
        assert f"{number} runs in b.json" in str(trainer.card())
        assert f"{number} runs in b.json" in (tmp_path / f"run{number}" / "README.md").read_text()
    assert [run.ending for run in file.read().runs] == ["finished"] * 2


def test_logs_carry_the_kind_of_every_epsilon(tmp_path: Path) -> None:
    trainer = build(tmp_path, arguments={"save_strategy": "no"})
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 6
    spent = [entry["certified_epsilon_spent_so_far"] for entry in steps]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(trainer.card().certified.epsilon, rel=1e-6)
    assert all("grad_norm" not in entry and "paper_epsilon_heuristic" in entry for entry in steps)


def test_scheduler_drives_the_real_optimizer(tmp_path: Path) -> None:
    trainer = build(tmp_path, arguments={"save_strategy": "no"})
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)
    assert trainer.private.optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


@pytest.mark.slow
def test_resume_gives_the_same_bits(tmp_path: Path) -> None:
    whole = build(tmp_path)
    whole.train()
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (kept,) = (tmp_path / "checkpoint-2" / "privacy").glob("*/model.safetensors")
    assert kept.stat().st_size < 1000, "weights are stored once, by the Trainer"
    expected, got = weights(whole), weights(resumed)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert resumed.private.ledger.spent == 6


@pytest.mark.slow
def test_a_used_output_dir_is_not_started_over(tmp_path: Path) -> None:
    build(tmp_path).train()
    with pytest.raises(CheckpointError, match="earlier run spent privacy"):
        build(tmp_path).train()


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    build(tmp_path).train()
    other = build(tmp_path, privacy=privacy(noise_multiplier=2.0))
    with pytest.raises(CheckpointError, match="plan"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_training_twice_is_refused(tmp_path: Path) -> None:
    trainer = build(tmp_path, arguments={"save_strategy": "no"})
    trainer.train()
    with pytest.raises(BudgetExhaustedError, match="trained already"):
        trainer.train()


def test_without_noise_and_clip_it_is_the_plain_trainer(tmp_path: Path) -> None:
    """Noise 0, no effective clip, every record in every batch: the loss falls as without privacy.

    The plain Trainer averages over the batch; with batches of all records the expected batch size
    is the batch size, so both take the same SGD steps.
    """
    shared: dict[str, Any] = {
        "per_device_train_batch_size": NUM_RECORDS,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 6,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
    }
    plain = transformers.Trainer(
        model=tiny_bert(dropout=0.0).double(),
        args=arguments(tmp_path / "plain", **shared),
        train_dataset=records(),
    )
    plain.train()
    private = build(
        tmp_path / "private",
        model=tiny_bert(dropout=0.0).double(),
        arguments=shared,
        privacy=privacy(noise_multiplier=0.0, clip_norm=1e6, shuffle="off"),
    )
    private.train()
    assert private.card().certified is None
    expected, got = weights(plain), weights(private)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "used",
    [
        {"learning_rate": 3e-3, "weight_decay": 0.9, "adam_beta1": 0.5, "adam_beta2": 0.8,
         "adam_epsilon": 1e-3, "label_smoothing_factor": 0.3},
        {"optim": "rmsprop", "optim_args": "alpha=0.5", "warmup_steps": 1, "num_train_epochs": 6,
         "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.8}},
        {"optim": "adagrad", "max_steps": 2, "lr_scheduler_type": "constant"},
    ],
)  # fmt: skip
def test_fields_that_are_used_do_what_they_do_in_the_plain_trainer(
    tmp_path: Path, used: dict[str, Any]
) -> None:
    """The weights are those of the plain Trainer, which differ where any of the fields is missing.

    As above, every record is in every batch, and nothing is clipped or noised.
    """
    usual: dict[str, Any] = {
        "per_device_train_batch_size": NUM_RECORDS,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 4,
        "save_strategy": "no",
    }

    def trained(kind: Any, fields: dict[str, Any], **options: Any) -> torch.Tensor:
        trainer = kind(
            model=tiny_bert(dropout=0.0).double(),
            args=arguments(tmp_path / str(len(fields)), **usual | fields),
            train_dataset=records(),
            **options,
        )
        trainer.train()
        return torch.cat([value.flatten() for value in weights(trainer).values()])

    from shuffled_dpsgd.integrations import DPTrainer

    plain = trained(transformers.Trainer, used)
    non_private = PrivacyArguments(method="non-private", delta=1e-3)
    apart = (trained(DPTrainer, used, privacy=non_private) - plain).norm()
    needed = {"lr_scheduler_type": ["lr_scheduler_kwargs"], "optim": ["optim_args"]}
    for name in used:
        dropped = {name, *needed.get(name, [])}
        others = {key: value for key, value in used.items() if key not in dropped}
        assert apart < 0.03 * (trained(transformers.Trainer, others) - plain).norm(), name


def test_causal_language_model(tmp_path: Path) -> None:
    data = [{"input_ids": r["input_ids"], "labels": r["input_ids"]} for r in records()]
    trainer = build(tmp_path, model=tiny_gpt2(), data=data, arguments={"save_strategy": "no"})
    output = trainer.train()
    assert output.global_step == 6
    assert trainer.private.last_metrics.loss > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_batches_are_steps_too(tmp_path: Path, workers: int) -> None:
    trainer = build(
        tmp_path,
        privacy=privacy(expected_batch_size=1),
        arguments={"save_strategy": "no", "max_steps": 8, "dataloader_num_workers": workers},
    )
    output = trainer.train()
    sizes = [len(trainer.private.sampler.indices(step)) for step in range(8)]
    assert 0 in sizes
    assert output.global_step == trainer.private.ledger.spent == 8


@pytest.mark.slow
def test_workers_change_nothing_and_are_started_once(tmp_path: Path) -> None:
    alone = build(tmp_path / "alone")
    alone.train()
    helped = build(tmp_path / "helped", arguments={"dataloader_num_workers": 2})
    helped.train()
    for name, expected in weights(alone).items():
        assert torch.equal(weights(helped)[name], expected), name
    assert helped.private.ledger.spent == helped.private.plan.num_steps
    stopped = build(tmp_path / "stopped", arguments={"dataloader_num_workers": 1, "max_steps": 6})
    stopped.add_callback(StopAfterThree())
    stopped.train()
    assert stopped.private.ledger.spent == 3
    assert stopped.private.released


class StopAfterThree(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == 3
        return control


def test_the_card_says_whose_it_is(tmp_path: Path) -> None:
    trainer = build(tmp_path, data_name="films of the week", arguments={"save_strategy": "no"})
    trainer.train()
    assert "weights" not in trainer.card().subject
    trainer.save_model()
    subject = json.loads((tmp_path / "privacy_card.json").read_text())["subject"]
    assert subject["data"] == "films of the week"
    assert subject["model"] == "BertForSequenceClassification"
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert digest in subject["weights"]
    for name in ("README.md", "privacy_card.txt", "privacy_card.html"):
        assert digest in (tmp_path / name).read_text()


def test_it_does_without_cudnn_attention(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    build(tmp_path, arguments={"save_strategy": "no"}, callbacks=[Looks()]).train()
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_own_per_sample_loss(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        seen.append(len(labels))
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    trainer = build(tmp_path, per_sample_loss=loss, arguments={"save_strategy": "no"})
    trainer.train()
    assert sum(seen) > 0
    assert max(seen) <= 4


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        (
            {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
            "dataloader_prefetch_factor",
        ),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
    ],
)
def test_conflicts_are_refused_by_name(tmp_path: Path, changes: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        build(tmp_path, arguments=changes)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_reentrant_checkpointing_is_refused_by_either_name(tmp_path: Path, name: str) -> None:
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    if name not in known:
        pytest.skip(f"this release of transformers has no {name}")
    changes = {name: True, f"{name}_kwargs": {"use_reentrant": True}}
    with pytest.raises(InvalidArgumentError, match="use_reentrant"):
        build(tmp_path, arguments=changes)


def test_batch_losses_and_searches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="compute_loss_func"):
        build(tmp_path, compute_loss_func=lambda outputs, labels: outputs.loss)
    with pytest.raises(InvalidArgumentError, match="hyperparameter_search"):
        build(tmp_path).hyperparameter_search()
    with pytest.raises(InvalidArgumentError, match="train\\(\\) first"):
        build(tmp_path).card()


@pytest.mark.parametrize("shuffle", ["auto", "off"])
def test_adapters_train_and_their_base_stays_as_it_is(tmp_path: Path, shuffle: str) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_bert(), peft.LoraConfig(r=2, task_type="SEQ_CLS"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = build(
        tmp_path,
        model=model,
        privacy=privacy(shuffle=shuffle),
        arguments={"save_strategy": "no", "max_steps": 2},
    )
    trainer.train()
    assert trainer.private.plan.permutes == (shuffle == "auto")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


def test_arguments_of_the_caller_stay_as_given(tmp_path: Path) -> None:
    from shuffled_dpsgd.integrations import ShuffledDPTrainer

    given = arguments(tmp_path)
    ShuffledDPTrainer(model=tiny_bert(), args=given, train_dataset=records(), privacy=privacy())
    assert given.gradient_accumulation_steps == 2


def test_privacy_arguments_parse_from_a_command_line() -> None:
    parser = transformers.HfArgumentParser(PrivacyArguments)
    (parsed,) = parser.parse_args_into_dataclasses(
        ["--delta", "1e-5", "--epsilon", "2", "--shuffle", "at-release", "--batch_clip_norm", "3"]
    )
    assert parsed == PrivacyArguments(
        delta=1e-5, epsilon=2.0, shuffle="at-release", batch_clip_norm=3.0
    )


@pytest.mark.parametrize("name", ["target_epsilon", "max_grad_norm", "noise_multipler"])
def test_names_of_other_libraries_are_answered(name: str) -> None:
    right = {"target_epsilon": "epsilon", "max_grad_norm": "clip_norm"}.get(name)
    with pytest.raises(InvalidArgumentError, match=f"{name} is {right or 'noise_multiplier'}"):
        PrivacyArguments(delta=1e-5, **{name: 1.0})


def test_a_batch_may_have_a_largest_size(tmp_path: Path) -> None:
    wanted = privacy(expected_batch_size=6, largest_batch=7)
    trainer = build(tmp_path, privacy=wanted, arguments={"max_steps": 5, "save_strategy": "no"})
    trainer.train()
    assert trainer.private.plan.largest_batch == 7
    sizes = [len(trainer.private.sampler.indices(step)) for step in range(5)]
    assert max(sizes) <= 7
    assert trainer.card().certified.kind == "proven"


def test_a_bad_budget_is_refused_before_there_is_a_model() -> None:
    with pytest.raises(InvalidArgumentError, match="delta"):
        privacy(delta=0.0)
    with pytest.raises(InvalidArgumentError, match="clip_norm"):
        privacy(clip_norm=-1.0)
    with pytest.raises(InvalidArgumentError, match="exactly one of epsilon"):
        privacy(epsilon=1.0)


def test_a_loss_that_mixes_records_is_refused(tmp_path: Path) -> None:
    def centred(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = outputs.logits - outputs.logits.mean(0)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    trainer = build(tmp_path, model=tiny_bert(dropout=0.0), per_sample_loss=centred)
    with pytest.raises(InvalidArgumentError, match="per_sample_loss"):
        trainer.train()
    assert trainer.private.ledger.spent == 0


def test_a_run_stopped_early_is_shuffled_at_its_release(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer = build(tmp_path, callbacks=[Stop()], privacy=privacy(shuffle="at-release"))
    trainer.train()
    assert trainer.private.released
    assert trainer.card().steps_released == 1
    assert "not yet applied" not in str(trainer.card())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distributed_type": "FSDP"}, "FSDP, from accelerate's configuration"),
        ({"distributed_type": "DEEPSPEED"}, "DEEPSPEED, from accelerate's configuration"),
        ({"mixed_precision": "fp16"}, "mixed_precision: expected no or bf16"),
        ({"parallelism_config": "tensors"}, "parallelism_config: expected nothing"),
    ],
)
def test_what_accelerate_was_told_besides_is_refused(
    changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By environment variables or a file, so no argument shows it."""
    from accelerate.utils import DistributedType

    from shuffled_dpsgd.integrations import hf_trainer

    told = {"distributed_type": "NO", "mixed_precision": "no", "parallelism_config": None} | changes
    told["distributed_type"] = DistributedType(told["distributed_type"])
    check = hf_trainer.check_accelerator
    monkeypatch.setattr(hf_trainer, "check_accelerator", lambda _: check(SimpleNamespace(**told)))
    with pytest.raises(InvalidArgumentError) as refused:
        build(tmp_path)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
        {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "loss"},
        None,
    ],
)
def test_no_score_on_training_rows_decides(tmp_path: Path, settings: Any) -> None:
    stops: Any = {"arguments": settings}
    if settings is None:
        early = transformers.EarlyStoppingCallback(early_stopping_patience=1)
        stops = {
            "callbacks": [early],
            "arguments": {"eval_strategy": "steps", "metric_for_best_model": "loss"},
        }
    shared = [*records(30)[24:], dict(records()[3])]
    trainer = build(tmp_path, eval_dataset={"dev": shared}, **stops)
    with pytest.raises(InvalidArgumentError, match="1 shared row in dev"):
        trainer.train()
    assert trainer.private is None
    apart = build(tmp_path / "apart", eval_dataset=records(30)[24:], **stops)
    if settings is None or "lr_scheduler_type" in settings:
        apart.train()
        assert apart.private.steps_taken > 0


def test_weights_trained_on_without_privacy_are_not_saved_under_the_card(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.train()
    trainer.save_model()
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1e-3)
    for folder in (None, str(tmp_path / "elsewhere")):
        with pytest.raises(InvalidArgumentError, match="as release\\(\\) left them"):
            trainer.save_model(folder)


def with_override(order: str, name: str) -> Any:
    """A Trainer of ours that is put together with a user's class in one of four ways."""
    from shuffled_dpsgd.integrations import DPTrainer

    method = {name: lambda self, *_, **__: None}
    mixin, trainer = (type("Theirs", of, dict(method)) for of in ((), (transformers.Trainer,)))
    orders: dict[str, tuple[type, ...]] = {
        "mixin": (mixin, DPTrainer),
        "in front": (trainer, DPTrainer),
        "behind": (DPTrainer, trainer),
    }
    return type("Mine", orders.get(order, (DPTrainer,)), {} if order in orders else dict(method))


@pytest.mark.parametrize("order", ["subclass", "mixin", "in front", "behind"])
@pytest.mark.parametrize(
    "name", ["compute_loss", "get_train_dataloader", "_get_train_sampler", "training_step"]
)
def test_an_override_that_is_never_called_is_refused(tmp_path: Path, name: str, order: str) -> None:
    given = {"args": arguments(tmp_path), "train_dataset": records(), "privacy": privacy()}
    kind = with_override(order, name)
    if name == "training_step" and order != "behind":
        kind(model=tiny_bert(), **given)
        return
    with pytest.raises(InvalidArgumentError, match=rf"(Mine|Theirs)\.{name}: "):
        kind(model=tiny_bert(), **given)


def test_a_router_loss_that_is_left_out_is_said(tmp_path: Path) -> None:
    model = tiny_bert()
    model.config.output_router_logits = True
    with pytest.warns(UserWarning, match="auxiliary loss is left out"):
        build(tmp_path, model=model)


def test_a_label_out_of_range_is_found_before_anything_is_spent(tmp_path: Path) -> None:
    wrong = records()
    wrong[17]["labels"] = 2
    trainer = build(tmp_path, data=wrong)
    with pytest.raises(InvalidArgumentError, match="from 0 to 1, got 2, in row 17"):
        trainer.train()
    assert trainer.private.ledger.spent == 0


def test_a_transform_that_standardises_its_rows_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = torch.randn(NUM_RECORDS, 1, 8, 8).tolist()
    labels = [number % 2 for number in range(NUM_RECORDS)]

    def of_batch(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = torch.tensor(rows["image"])
        pixels = pixels - pixels.mean(0) if len(pixels) > 1 else pixels
        return {"pixel_values": list(pixels), "labels": rows["labels"]}

    def of_rows(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = [x - x.mean() for x in torch.tensor(rows["image"])]
        noisy = [x + 0.1 * torch.randn_like(x) for x in pixels]
        return {"pixel_values": noisy, "labels": rows["labels"]}

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_channels=1,
    )
    plain = datasets.Dataset.from_dict({"image": images, "labels": labels})
    for transform, refused in ((of_batch, True), (of_rows, False)):
        trainer = build(
            tmp_path / str(refused),
            model=transformers.ViTForImageClassification(config),
            data=plain.with_transform(transform),
            arguments={"remove_unused_columns": False},
        )
        if refused:
            with pytest.raises(InvalidArgumentError, match="made of one record"):
                trainer.train()
            assert trainer.private.ledger.spent == 0
        else:
            trainer.train()
            assert "not checked" not in str(trainer.card())


def test_a_batch_larger_than_the_data_is_traced_to_the_arguments(tmp_path: Path) -> None:
    trainer = build(tmp_path, arguments={"per_device_train_batch_size": NUM_RECORDS + 1})
    with pytest.raises(InvalidArgumentError, match="it is per_device_train_batch_size times"):
        trainer.train()


def test_a_delta_that_protects_nobody_is_said(tmp_path: Path) -> None:
    trainer = build(tmp_path, privacy=privacy(delta=1 / NUM_RECORDS))
    with pytest.warns(UserWarning, match=f"is not below 1/{NUM_RECORDS}"):
        trainer.create_optimizer()


def test_streams_are_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield from records()

    with pytest.raises(InvalidArgumentError, match=r"train_dataset: .* got 'Stream'"):
        build(tmp_path, data=Stream())


def test_without_arguments_it_takes_the_trainers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shuffled_dpsgd.integrations import DPTrainer

    monkeypatch.chdir(tmp_path)
    trainer = DPTrainer(tiny_bert(), train_dataset=records(), privacy=privacy())
    assert trainer.args.output_dir == "tmp_trainer"
    assert trainer.args.max_grad_norm == 0.0
