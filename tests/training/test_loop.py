"""The reference loop: progress, schedules, physical batches that fit, resumption."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import (
    BudgetExhaustedError,
    CheckpointError,
    InvalidArgumentError,
)
from shuffled_dpsgd.training import (
    LoopSettings,
    PrivateTraining,
    Progress,
    find_physical_batch_size,
    make_private,
    train,
)
from training.cases import FixedSampler, classify, distance, make_mlp, mlp_case, vectors, weights


def start(**changes: Any) -> PrivateTraining:
    model = make_mlp()
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 8,
        "num_steps": 5,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
        "seed": 3,
    }
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **(settings | changes))


def test_callbacks_see_every_update_with_both_epsilons() -> None:
    private = start(epsilon=3.0, noise_multiplier=None)
    private.sampler = FixedSampler([1, 2, 3], [])
    seen: list[Progress] = []
    outcome = train(private, vectors(), classify, callbacks=[seen.append])
    assert (outcome.steps_taken, outcome.finished, outcome.interrupted_by) == (5, True, None)
    assert private.released
    assert [progress.metrics.batch_size for progress in seen] == [3, 0, 3, 0, 3]
    certified = [progress.certified.epsilon for progress in seen if progress.certified]
    assert len(certified) == 5
    assert certified == sorted(certified)
    assert 2.9 < certified[-1] <= 3.0
    assert {progress.paper.kind for progress in seen if progress.paper} == {"heuristic"}
    assert [len(progress.sample_norms) for progress in seen] == [3, 0, 3, 0, 3]
    assert all(progress.seconds > 0 for progress in seen)


def test_it_does_without_cudnn_attention() -> None:
    seen: list[bool] = []
    train(
        start(num_steps=2),
        vectors(),
        classify,
        callbacks=[lambda _: seen.append(torch.backends.cuda.cudnn_sdp_enabled())],
    )
    assert seen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_schedule_moves_with_every_update() -> None:
    private = start(num_steps=3)
    private.sampler = FixedSampler([], [1])
    rates: list[float] = []
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, 1, gamma=0.1)
    train(
        private,
        vectors(),
        classify,
        scheduler=scheduler,
        callbacks=[lambda progress: rates.append(progress.learning_rate)],
    )
    assert rates == pytest.approx([0.1, 0.01, 0.001])


def test_loop_equals_the_loop_written_by_hand_and_resumes_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    whole = start()
    train(whole, vectors(), classify)
    settings = LoopSettings(checkpoint_dir=tmp_path, checkpoint_every=2)
    first = start()
    stop = _StopAfter(first, 3)
    with pytest.raises(KeyboardInterrupt):
        train(first, vectors(), classify, settings=settings, callbacks=[stop])
    second = start()
    outcome = train(second, vectors(), classify, settings=settings, resume=True)
    assert outcome.checkpoint == tmp_path / "checkpoint-00000005"
    assert distance(weights(whole.model), weights(second.model)) == 0.0
    again = train(start(), vectors(), classify, settings=settings, resume=True)
    assert again.finished
    with pytest.raises(InvalidArgumentError, match="checkpoint_dir"):
        train(start(), vectors(), classify, resume=True)


def test_a_spent_ledger_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    """Untrained weights would pass for a finished run: there is no release left to spend."""
    settings = LoopSettings(checkpoint_dir=tmp_path / "checkpoints", keep_checkpoints=1)
    ledger = tmp_path / "ledger.jsonl"
    train(start(seed=None, ledger_path=ledger), vectors(), classify, settings=settings)
    shutil.rmtree(tmp_path / "checkpoints")
    again = start(seed=None, ledger_path=ledger)
    with pytest.raises(CheckpointError, match="5 releases are spent"):
        train(again, vectors(), classify, settings=settings, resume=True)
    with pytest.raises(BudgetExhaustedError, match="not one step"):
        train(again, vectors(), classify)
    assert not again.released


def test_there_is_a_checkpoint_before_the_first_release(tmp_path: Path) -> None:
    settings = LoopSettings(checkpoint_dir=tmp_path / "checkpoints")
    private = start(seed=None, ledger_path=tmp_path / "ledger.jsonl")
    stop = _StopAfter(private, 1)
    with pytest.raises(KeyboardInterrupt):
        train(private, vectors(), classify, settings=settings, callbacks=[stop])
    again = start(seed=None, ledger_path=tmp_path / "ledger.jsonl")
    assert again.ledger.spent == 1
    outcome = train(again, vectors(), classify, settings=settings, resume=True)
    assert (outcome.steps_taken, again.ledger.spent) == (4, 5)


class _StopAfter:
    def __init__(self, private: PrivateTraining, steps: int) -> None:
        self._private = private
        self._steps = steps

    def __call__(self, progress: Progress) -> None:
        if self._private.steps_taken == self._steps:
            raise KeyboardInterrupt


class Memory:
    """A loss that runs out of memory above a batch size."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tried: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.tried.append(len(batch.x))
        if len(batch.x) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        return classify(model, batch)


def test_the_physical_batch_is_halved_until_it_fits() -> None:
    private = start(expected_batch_size=32)
    loss = Memory(limit=5)
    before, randomness = weights(private.model), torch.get_rng_state()
    assert find_physical_batch_size(private, vectors(), loss) == 4
    assert loss.tried == [32, 16, 8, 4]
    assert private.physical_batch_size == 4
    assert private.ledger.spent == 0
    assert distance(before, weights(private.model)) == 0.0
    assert torch.equal(randomness, torch.get_rng_state())
    train(private, vectors(), loss, settings=LoopSettings(physical_batch="find"))
    assert max(loss.tried[4:]) <= 32
    with pytest.raises(InvalidArgumentError, match="gradient checkpointing"):
        find_physical_batch_size(private, vectors(), Memory(limit=0))


def test_bf16_runs_end_close_to_float32_and_keep_float32_weights() -> None:
    finals = {}
    for precision in ("float32", "bf16"):
        private = start()
        train(
            private,
            mlp_case().data,
            classify,
            settings=LoopSettings(precision=precision, price_steps=False),  # type: ignore[arg-type]
        )
        finals[precision] = weights(private.model)
    assert {tensor.dtype for tensor in finals["bf16"].values()} == {torch.float32}
    assert 0 < distance(finals["float32"], finals["bf16"]) < 0.05
