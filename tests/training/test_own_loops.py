"""The loops people write: epochs, cells run again, adapters, loaders of their own."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from shuffled_dpsgd.errors import (
    BudgetExhaustedError,
    CheckpointError,
    InvalidArgumentError,
    UnsupportedModuleError,
)
from shuffled_dpsgd.training import (
    PrivateTraining,
    find_checkpoints,
    load_checkpoint,
    make_private,
    save_checkpoint,
    train,
)
from training.cases import classify, make_bert, make_mlp, mlp_case, run, vectors

SETTINGS: dict[str, Any] = {
    "dataset_size": 40,
    "expected_batch_size": 10,
    "epochs": 3,
    "delta": 1e-3,
    "noise_multiplier": 1.0,
    "shuffle": "off",
    "seed": 3,
}


def private_mlp(model: torch.nn.Module | None = None, **changes: Any) -> PrivateTraining:
    model = model or make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, **(SETTINGS | changes))


def take(private: PrivateTraining, batches: Any) -> None:
    for batch in batches:
        private.backward(classify(private.model, batch))
        private.step()


def test_a_pass_per_epoch_takes_all_steps_and_no_more() -> None:
    private = private_mlp()
    ends = []
    for epoch in private.epochs():
        batches = private.batches(vectors())
        assert len(batches) == private.steps_per_epoch == 4
        take(private, batches)
        ends.append((epoch, private.steps_taken))
    assert ends == [(0, 4), (1, 8), (2, 12)]
    assert private.finished


def test_epochs_go_on_where_a_run_was_and_give_up_when_nothing_happens() -> None:
    private = private_mlp()
    take(private, private.batches(vectors(), num_steps=5))
    ends = []
    for epoch in private.epochs():
        take(private, private.batches(vectors()))
        ends.append((epoch, private.steps_taken))
    assert ends == [(1, 8), (2, 12)]
    idle = private_mlp()
    assert list(idle.epochs()) == [0]
    assert len(idle.batches(vectors())) == 12


def test_a_second_pass_over_the_whole_plan_is_explained() -> None:
    private = private_mlp()
    take(private, private.batches(vectors()))
    with pytest.raises(BudgetExhaustedError, match=r"private\.epochs\(\)"):
        private.batches(vectors())


def test_a_cell_run_again_closes_the_first_run_and_says_so() -> None:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = make_private(model, optimizer, **SETTINGS)
    suspended = first.batches(vectors())
    next(suspended)
    with pytest.warns(UserWarning, match="closed after 0 steps"):
        second = make_private(model, optimizer, **SETTINGS)
    take(second, second.batches(vectors()))
    assert second.finished
    with pytest.raises(InvalidArgumentError, match="make_private was called again"):
        first.batches(vectors())
    suspended.close()
    second.close()
    third = make_private(
        model, optimizer, **(SETTINGS | {"seed": 4})
    )  # no warning: the second was closed
    take(third, third.batches(vectors(), num_steps=1))


def test_the_folder_given_to_save_is_enough_to_load(tmp_path: Path) -> None:
    private = private_mlp()
    for _ in range(2):
        run(private, mlp_case(), num_steps=2)
        save_checkpoint(private, tmp_path / "ck")
    again = private_mlp()
    load_checkpoint(again, tmp_path / "ck")
    assert again.steps_taken == 4
    early, late = find_checkpoints(tmp_path / "ck")
    (late / "state.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=f"the one before it is .*{early.name}"):
        load_checkpoint(private_mlp(), tmp_path / "ck")
    back = private_mlp()
    load_checkpoint(back, early)
    assert back.steps_taken == 2
    with pytest.raises(CheckpointError, match="what save_checkpoint was given"):
        load_checkpoint(private_mlp(), tmp_path / "absent")


class Stream(IterableDataset[int]):
    """Records that come once, in order."""

    def __iter__(self) -> Any:
        return iter(range(40))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (Stream(), "map-style"),
        (iter(range(40)), "map-style"),
        (vectors(count=41), "40 records"),
    ],
)
def test_data_that_cannot_be_sampled_are_refused_with_the_right_call(data: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        private_mlp().batches(data)


def test_a_loader_of_ones_own_is_told_the_right_call() -> None:
    private = private_mlp()
    with private, pytest.raises(InvalidArgumentError, match=r"private\.batches\(loader\.dataset"):
        private.step()
    with pytest.raises(InvalidArgumentError, match="a tensor"):
        private.backward(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"noise_multiplier": None, "epsilon": "1"}, "epsilon: expected a number"),
        ({"delta": None}, "delta: expected a number"),
        ({"delta": "1e-5"}, "delta: expected a number"),
        ({"clip_norm": None}, "clip_norm: expected a number"),
        ({"clip_norm": "1"}, "clip_norm: expected a number"),
        ({"clip_norm": True}, "clip_norm: expected a number"),
        ({"batch_clip_norm": [1]}, "batch_clip_norm: expected a number"),
        ({"noise_multiplier": "1"}, "noise_multiplier: expected a number"),
        ({"epochs": True}, "epochs: expected a positive integer"),
        ({"expected_batch_size": 1.5}, "expected_batch_size: expected a positive integer"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(changes: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        private_mlp(**changes)


def test_models_and_optimizers_of_the_wrong_kind_are_refused() -> None:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match="model comes first"):
        make_private(model, model, **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"torch\.nn\.Module"):
        make_private(optimizer, optimizer, **SETTINGS)  # type: ignore[arg-type]
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(InvalidArgumentError, match=r"optimizer\.optimizer"):
        make_private(model, prepared, **SETTINGS)


def test_a_checkpoint_without_weights_knows_which_they_were(tmp_path: Path) -> None:
    private = private_mlp()
    run(private, mlp_case(), num_steps=2)
    path = save_checkpoint(private, tmp_path, weights=False)
    with pytest.raises(CheckpointError, match="not those of the checkpoint"):
        load_checkpoint(private_mlp(), path)
    again = private_mlp()
    again.model.load_state_dict(private.model.state_dict())
    load_checkpoint(again, path)
    assert again.steps_taken == 2


def test_encoder_decoders_shuffle_once_their_shared_biases_are_frozen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    settings = SETTINGS | {"shuffle": "every-step"}
    with pytest.raises(UnsupportedModuleError, match=r"relative_attention_bias.*freeze it"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    private = make_private(model, torch.optim.SGD(trained, lr=0.1), **settings)
    assert private.spec is not None
    assert "decoder.block.0.layer.2.DenseReluDense.wi.weight" in private.spec.moved_names


def test_a_schedule_cannot_follow_the_training_loss() -> None:
    """The rate would depend on single records, and the weights on the rate."""
    private = private_mlp()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer)
    take(private, private.batches(vectors(), num_steps=1))
    metrics = private.last_metrics
    assert metrics is not None
    assert metrics.loss is not None
    loss, block = metrics.loss, metrics.release.blocks[0]
    plain = (loss, sum([loss, loss]) / 2, 1.0 - loss * 0.5, -loss, abs(loss), round(loss, 3))
    norms = (block.sum_norm, metrics.signal_to_noise, private.last_sample_norms.mean())
    for seen in (*plain, loss**2, loss // 0.1, *norms, private.last_sample_norms.max().item):
        with pytest.raises(InvalidArgumentError, match="without noise"):
            plateau.step(seen() if callable(seen) else seen)
    assert json.loads(json.dumps(metrics.to_json()))["loss"] == metrics.loss
    assert f"{metrics.loss:.3f}" == f"{metrics.loss + 0.0:.3f}"


def test_stopping_by_the_training_loss_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shuffled_dpsgd.runtime.notices._said", set())
    private = private_mlp()
    take(private, private.batches(vectors(), num_steps=1))
    metrics = private.last_metrics
    assert metrics is not None
    assert metrics.loss is not None
    assert metrics.to_json()["batch_clip_factors"]
    with pytest.warns(RuntimeWarning, match="no ε covers that choice"):
        assert metrics.loss < math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert min(metrics.loss, math.inf) == metrics.loss


def test_a_plateau_schedule_is_refused_before_anything_is_spent() -> None:
    private = private_mlp()
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer)
    with pytest.raises(InvalidArgumentError, match="ReduceLROnPlateau, which follows a metric"):
        train(private, vectors(), classify, scheduler=plateau)
    assert private.ledger.spent == 0


@pytest.mark.parametrize("kind", ["VBLORA", "PROMPT_TUNING", "P_TUNING"])
def test_adapters_that_cannot_be_clipped_are_refused_at_once(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = {
        "VBLORA": lambda: peft.VBLoRAConfig(
            num_vectors=16, vector_length=4, r=2, target_modules=["query"]
        ),
        "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2),
        "P_TUNING": lambda: peft.PromptEncoderConfig(
            task_type="SEQ_CLS", num_virtual_tokens=2, encoder_hidden_size=8
        ),
    }[kind]()
    model = peft.get_peft_model(make_bert(), config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(InvalidArgumentError, match=f"PEFT's {kind}"):
        make_private(model, optimizer, **SETTINGS)


def test_an_adaption_prompt_is_refused_at_once() -> None:
    peft = pytest.importorskip("peft")
    model = make_mlp()
    model.peft_config = {"default": peft.AdaptionPromptConfig()}  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match="ADAPTION_PROMPT"):
        private_mlp(model)


def test_a_delta_of_one_record_is_warned_of_in_python_too() -> None:
    with pytest.warns(UserWarning, match="is not below 1/40"):
        private_mlp(delta=0.05)


@pytest.mark.parametrize(
    ("scaled", "said"), [(lambda losses: losses / 4, "divided by 4"), (lambda x: x * 8.0, "by 8")]
)
def test_losses_scaled_by_a_constant_are_said(scaled: Any, said: str) -> None:
    private = private_mlp()
    batches = private.batches(vectors())
    batch = next(batches)
    with pytest.warns(UserWarning, match=said):
        private.backward(scaled(classify(private.model, batch)))


def test_a_loss_that_goes_backward_unseen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing shows whether it is the sum."""
    monkeypatch.setattr("shuffled_dpsgd.runtime.notices._said", set())
    private = private_mlp()
    batches = private.batches(vectors())
    batch = next(batches)
    losses = classify(private.model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.sum().backward()
    losses = classify(private.model, batch)
    with pytest.warns(RuntimeWarning, match="went backward by itself"):
        (losses @ torch.full_like(losses, 0.1)).backward()


def test_losses_divided_by_their_own_lengths_are_nothing_to_say() -> None:
    private = private_mlp()
    batches = private.batches(vectors())
    batch = next(batches)
    losses = classify(private.model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.backward(losses / torch.full_like(losses, 2.0).detach())
