"""TRL's trainers train privately: a record, or a pair, has TRL's own loss, clipped by itself."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
import sys
import types
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from integrations.tiny_llms import (
    NUM_RECORDS,
    dpo,
    llama,
    lora,
    privacy,
    qwen,
    records,
    settings,
    sft,
    tokenizer,
    transformers,
    trl,
)
from shuffled_dpsgd.core.clip import PlainClipping
from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.training.saved_card import read_card

pytestmark = pytest.mark.filterwarnings("ignore")


def shake(model: Any) -> None:
    """Give adapters values: with B at zero, half of the gradients would be."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def own_losses(trainer: Any, base: Any, rows: int) -> list[torch.Tensor]:
    """What TRL's own trainer makes of each record alone."""
    data, collate = trainer.train_dataset, trainer.data_collator
    found = []
    for row in range(rows):
        batch = collate([data[row]])
        found.append(base.compute_loss(trainer, trainer.model, dict(batch)))
    return found


def our_losses(trainer: Any, rows: int) -> torch.Tensor:
    batch = trainer._collator()([trainer.train_dataset[row] for row in range(rows)])
    with trainer._calling_model():
        return cast(torch.Tensor, trainer.per_sample_losses(trainer.model, dict(batch)))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("text", {}),
        ("completion", {}),
        ("completion", {"completion_only_loss": False}),
        ("chat", {}),
        ("chat", {"assistant_only_loss": True}),
        ("chat", {"assistant_only_loss": True, "loss_type": "dft"}),
        ("text", {"label_smoothing_factor": 0.2}),
        ("text", {"max_length": 5}),
    ],
)
def test_a_record_has_the_loss_that_trl_gives_it_alone(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    trainer = sft(tmp_path, kind, config=config)
    shake(trainer.model)
    theirs = torch.stack(own_losses(trainer, trl.SFTTrainer, 6))
    torch.testing.assert_close(our_losses(trainer, 6), theirs, rtol=1e-5, atol=1e-6)


KINDS = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)


@pytest.mark.parametrize(
    "config",
    [
        *({"loss_type": [kind], "label_smoothing": 0.1} for kind in KINDS),
        *({"f_divergence_type": kind} for kind in ("forward_kl", "js_divergence")),
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        {"ld_alpha": 0.3},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
    ],
    ids=str,
)
def test_a_pair_has_the_loss_that_trl_gives_it_alone(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    trainer = dpo(tmp_path, config=config | {"beta": 0.4})
    shake(trainer.model)
    theirs = torch.stack(own_losses(trainer, trl.DPOTrainer, 5))
    torch.testing.assert_close(our_losses(trainer, 5), theirs, rtol=1e-4, atol=1e-5)


def test_the_list_of_pair_losses_is_that_of_the_table() -> None:
    from shuffled_dpsgd.integrations.trainer_fields import decisions

    assert {*decisions()["loss_type"].only} == {*KINDS, "nll", "dft"}


@pytest.mark.parametrize("adapters", [True, False])
def test_a_pair_is_clipped_as_one_record(tmp_path: Path, adapters: bool) -> None:
    """The clipped sum is that of the definition, with TRL's loss of each pair alone."""
    trainer = dpo(
        tmp_path,
        model=llama().double(),
        peft_config=lora() if adapters else None,
        ref_model=None if adapters else llama().double(),
        config={"beta": 2.0},
        privacy=privacy(clip_norm=0.05, expected_batch_size=6),
    )
    trainer.model.double()
    shake(trainer.model)
    trainer.create_optimizer()
    trainer.model.train()
    engine = trainer.private.engine
    with trainer._calling_model(), engine:
        engine.backward(our_losses(trainer, 6))
    oracle = PlainClipping(trainer.model, clip_norm=0.05)
    for loss in own_losses(trainer, trl.DPOTrainer, 6):
        oracle.add(loss)
    norms = oracle.sample_norms
    assert (norms > 0.05).any()
    # TRL's own losses are computed in float32.
    torch.testing.assert_close(engine.sample_norms, norms, rtol=1e-5, atol=0)
    for name, expected in oracle.clipped_sum().items():
        torch.testing.assert_close(engine.clipped_sum()[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "model", "shuffle"),
    [
        ("chat", llama, None),
        ("text", qwen, "off"),
        pytest.param("completion", llama, "off", marks=pytest.mark.slow),
        pytest.param("chat", qwen, None, marks=pytest.mark.slow),
    ],
)
def test_fine_tuning_spends_what_the_plan_says(
    tmp_path: Path, kind: str, model: Any, shuffle: str | None
) -> None:
    trainer = sft(tmp_path, kind, model=model(), privacy=privacy(shuffle=shuffle))
    trainer.train()
    card = trainer.card()
    assert trainer.private.plan.permutes == (shuffle is None), "by default, the adapters' ranks"
    assert trainer.private.ledger.spent == 2
    assert trainer.private.plan.dataset_size == NUM_RECORDS
    assert 0 < card.certified.epsilon <= 8
    assert "not checked" not in str(card)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    "options",
    [
        {"privacy": privacy(shuffle=None)},
        pytest.param({"config": {"precompute_ref_log_probs": True}}, marks=pytest.mark.slow),
        pytest.param({"peft_config": None, "ref_model": "another"}, marks=pytest.mark.slow),
    ],
    ids=["default", "precomputed", "another"],
)
def test_preferences_are_learned_privately(tmp_path: Path, options: dict[str, Any]) -> None:
    if "ref_model" in options:
        options = options | {"ref_model": llama()}
    trainer = dpo(tmp_path, **options)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.private.plan.dataset_size == NUM_RECORDS
    assert trainer.private.ledger.spent == 2
    assert "not checked" not in str(trainer.card())
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert "forward" not in vars(trainer.model) or trainer.model.forward.__name__ != "of_pairs"


def test_half_precision_and_a_following_clip_pass_the_referee(tmp_path: Path) -> None:
    """accelerate casts inside the model's forward, where nobody outside would see it."""
    trainer = sft(tmp_path, config={"bf16": True}, privacy=privacy(clip_quantile=0.5))
    trainer.train()
    assert trainer.private.ledger.spent == 2
    assert trainer.private.moving_clip.level != 1.0
    assert "follows the norms" in str(trainer.card())


@pytest.mark.parametrize(
    "strategy",
    ["bfd", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bfd_split", "wrapped"))],
)
def test_packing_is_refused_unless_the_packed_sequence_is_the_unit(
    tmp_path: Path, strategy: str
) -> None:
    packing = {"packing": True, "packing_strategy": strategy, "max_length": 16}
    with pytest.raises(InvalidArgumentError, match="packing: expected False"):
        sft(tmp_path, config=packing)
    trainer = sft(tmp_path, config=packing, privacy=privacy(unit="sequence after packing"))
    assert len(trainer.train_dataset) < NUM_RECORDS
    trainer.train()
    assert trainer.private.plan.dataset_size == len(trainer.train_dataset)
    assert "one sequence after packing" in str(trainer.card())


def test_texts_cut_into_overlapping_blocks_are_the_users_statement(tmp_path: Path) -> None:
    def blocks(rows: dict[str, Any]) -> dict[str, Any]:
        words = " ".join(rows["text"]).split()
        return {"text": [" ".join(words[at : at + 8]) for at in range(0, len(words) - 8, 4)]}

    cut = records("text").map(blocks, batched=True, remove_columns=["text"])
    given = privacy(unit="block of 8 words")
    trainer = sft(tmp_path, train_dataset=cut, privacy=given, config={"max_steps": 1})
    trainer.train()
    assert trainer.private.plan.dataset_size == len(cut) > NUM_RECORDS
    assert "one block of 8 words, as stated: one row each" in str(trainer.card())


def test_texts_of_one_packed_row_do_not_see_each_other(tmp_path: Path) -> None:
    trainer = sft(
        tmp_path,
        config={"packing": True, "max_length": 32},
        privacy=privacy(unit="sequence after packing"),
    )
    row = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) > 1)
    first = row["seq_lengths"][0]
    other = row | {"input_ids": [5] * first + row["input_ids"][first:]}
    labels = [-100] * first + row["labels"][first:]
    batch = trainer._collator()([each | {"labels": labels} for each in (row, other)])
    one, two = trainer.per_sample_losses(trainer.model, dict(batch))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"padding_free": True, "max_length": None}, "padding_free"),
        ({"activation_offloading": True}, "activation_offloading"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "selective"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
    ],
)
def test_what_mixes_records_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        sft(tmp_path, config=config)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_losses_that_sort_pairs_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"loss_type: .* got '{kind}'"):
        dpo(tmp_path, config={"loss_type": [kind]})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"per_sample_loss": lambda outputs, labels: labels}, "per_sample_loss"),
        ({"config": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor"),
        ({"config": {"torch_compile": True}}, "torch_compile"),
    ],
)
def test_what_pairs_have_no_use_for_is_refused(tmp_path: Path, options: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected no such option"):
        dpo(tmp_path, **options)


def test_trl_trainers_put_together_by_hand_are_refused(tmp_path: Path) -> None:
    """Their losses would be dropped; dft would silently be an ordinary loss."""
    from shuffled_dpsgd.integrations import DPTrainer

    given = {
        "model": llama(),
        "train_dataset": records("text"),
        "privacy": privacy(),
        "processing_class": tokenizer(),
    }
    for base in (trl.SFTTrainer, trl.DPOTrainer):
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        with pytest.raises(InvalidArgumentError, match=rf"{base.__name__}\.compute_loss"):
            type("Mine", (DPTrainer, base), {})(args=args, **given)


def test_adapters_that_cannot_be_clipped_are_refused_before_training(tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(InvalidArgumentError, match="PROMPT_TUNING"):
        sft(tmp_path, peft_config=prompt)


@pytest.mark.parametrize(("package", "extra"), [("trl", "trl"), ("transformers", "hf")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    from shuffled_dpsgd import integrations

    for home in ("trl_trainers", "hf_trainer"):
        monkeypatch.delitem(sys.modules, f"shuffled_dpsgd.integrations.{home}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    name = "DPSFTTrainer" if package == "trl" else "DPTrainer"
    with pytest.raises(MissingExtraError, match=rf"{package} is needed for {name}: .*\[{extra}\]"):
        getattr(integrations, name)


def test_what_must_differ_is_said_once_and_the_callers_arguments_stay(tmp_path: Path) -> None:
    from shuffled_dpsgd.runtime import notices

    notices._said.clear()
    config = trl.SFTConfig(**settings(tmp_path))
    from shuffled_dpsgd.integrations import DPSFTTrainer

    with pytest.warns(RuntimeWarning, match=r"max_grad_norm is set to 0\.0"):
        trainer = DPSFTTrainer(
            model=llama(),
            args=config,
            train_dataset=records("text"),
            processing_class=tokenizer(),
            privacy=privacy(),
        )
    assert (config.max_grad_norm, config.gradient_accumulation_steps) == (1.0, 2)
    assert (trainer.args.max_grad_norm, trainer.args.gradient_accumulation_steps) == (0.0, 1)


def test_without_arguments_it_takes_trls_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in TRL's first example; here on a CPU, which TRL has to be told."""
    from shuffled_dpsgd.integrations import DPDPOTrainer, DPSFTTrainer, trl_trainers

    monkeypatch.chdir(tmp_path)
    for name, kind, data in (("SFT", DPSFTTrainer, "text"), ("DPO", DPDPOTrainer, "pairs")):
        config = functools.partial(getattr(trl, f"{name}Config"), use_cpu=True, bf16=False)
        monkeypatch.setattr(trl_trainers, f"{name}Config", config)
        model = llama()
        model.config.name_or_path = "tiny/llama"
        trainer = kind(
            model,
            train_dataset=records(data),
            processing_class=tokenizer(),
            privacy=privacy(),
            peft_config=lora(),
        )
        assert trainer.args.output_dir == f"llama-{name}"
        assert trainer.args.max_grad_norm == 0.0


def test_evaluation_generation_and_the_saved_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = sft(
        tmp_path,
        "chat",
        eval_dataset=records("chat", 30).select(range(24, 30)),
        config={"eval_strategy": "steps", "eval_steps": 1},
    )
    trainer.train()
    assert [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.save_model()
    card = json.loads((tmp_path / "privacy_card.json").read_text())
    assert card["certified"]["kind"] == "proven"
    words = trainer.processing_class
    prompt = words.apply_chat_template(
        [{"role": "user", "content": "a b"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = trainer.model.generate(**prompt, max_new_tokens=3, do_sample=False)
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    torch.testing.assert_close(loaded.generate(**prompt, max_new_tokens=3, do_sample=False), answer)


@pytest.mark.parametrize("kind", ["sft", "plain"])
def test_what_is_uploaded_is_the_model_and_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nothing that was computed from records without noise, and no key, whenever it is uploaded."""
    from shuffled_dpsgd.integrations import DPTrainer

    sent: list[set[str]] = []
    readmes = []

    def upload(**given: Any) -> Any:
        folder = Path(given["folder_path"])
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        sent.append({n for n in names if not any(fnmatch(n, p) for p in given["ignore_patterns"])})
        readmes.extend(path.read_text() for path in folder.glob("README.md"))
        return types.SimpleNamespace(done=lambda: True, result=lambda: None)

    made = types.SimpleNamespace(repo_id="me/tiny")
    hub = types.SimpleNamespace(create_repo=lambda *_, **__: made, upload_folder=upload)
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    config: dict[str, Any] = {
        "hub_model_id": "me/tiny",
        "push_to_hub": True,
        "logging_steps": 1,
        "save_steps": 1,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    heldout = records("text", 30).select(range(24, 30))
    if kind == "sft":
        trainer = sft(tmp_path, config=config, eval_dataset=heldout)
    else:
        ids = [tokenizer()(text)["input_ids"] for text in records("text")["text"]]
        trainer = DPTrainer(
            llama(),
            transformers.TrainingArguments(**settings(tmp_path, **config)),
            train_dataset=[{"input_ids": row[:3], "labels": row[:3]} for row in ids],
            eval_dataset=[{"input_ids": [4, 5, 6], "labels": [4, 5, 6]}],
            privacy=privacy(),
        )
    result = trainer.train()
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    trainer.push_to_hub()
    weights = "adapter_model.safetensors" if kind == "sft" else "model.safetensors"
    assert len(sent) == 3
    assert all(weights in names for names in sent)
    last = {*sent[-1]} - {weights, "adapter_config.json", "config.json", "generation_config.json"}
    words = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "training_args.bin"}
    cards = {"README.md", *(f"privacy_card.{kind}" for kind in ("txt", "json", "html"))}
    assert cards <= last <= cards | words
    (folder,) = (tmp_path / "_uploaded").iterdir()
    assert folder.name == tmp_path.name
    assert str(read_card(folder)) in readmes[-1]
    assert f"{trainer.card().certified}" in readmes[-1]
    assert "Loss" not in readmes[-1]
    assert (tmp_path / "trainer_state.json").exists()
    assert trainer.state.log_history


def private_version(stock: str) -> str:
    """TRL's own script, made private."""
    return stock.replace(
        "from trl import SFTTrainer, get_dataset,",
        "from shuffled_dpsgd.integrations import DPSFTTrainer, PrivacyArguments\n"
        "    from trl import get_dataset,",
    ).replace(
        "trainer = SFTTrainer(\n",
        "trainer = DPSFTTrainer(\n"
        "        privacy=PrivacyArguments(epsilon=8, delta=1e-3, shuffle='off'),\n",
    )


def test_trls_own_script_runs_privately_with_five_changed_lines(tmp_path: Path) -> None:
    from trl.scripts import sft as script

    stock = inspect.getsource(script)
    ported = private_version(stock)
    changes = [*difflib.ndiff(stock.splitlines(), ported.splitlines())]
    assert 0 < sum(line.startswith("+ ") for line in changes) <= 5
    ast.parse(ported)
    model, data = tmp_path / "model", tmp_path / "data"
    llama().save_pretrained(model)
    tokenizer().save_pretrained(model)
    data.mkdir()
    records("chat").to_json(data / "train.jsonl")
    parser = trl.TrlParser(
        (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    )
    given = settings(tmp_path / "out", max_steps=2) | {
        "dataset_name": str(data),
        "model_name_or_path": str(model),
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "report_to": "none",
    }
    space: dict[str, Any] = {"__name__": "ported"}
    exec(compile(ported, "ported_sft.py", "exec"), space)
    space["main"](*parser.parse_dict(given))
    card = json.loads((tmp_path / "out" / "privacy_card.json").read_text())
    assert card["certified"]["epsilon"] <= 8
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_models_are_fine_tuned_from_their_folder(tmp_path: Path, bits: int) -> None:
    """As in TRL's script: a model by name, a quantization, a PEFT config."""
    pytest.importorskip("bitsandbytes")
    llama(hidden_size=64).save_pretrained(tmp_path / "model")
    config = (
        transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        if bits == 4
        else transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    )
    trainer = sft(
        tmp_path / "out",
        model=str(tmp_path / "model"),
        quantization_config=config,
        config={"model_init_kwargs": {"device_map": "cpu"}, "eval_strategy": "steps"},
        eval_dataset=records("text", 30).select(range(24, 30)),
    )
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.train()
    trainer.save_model()
    assert trainer.private.ledger.spent == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
