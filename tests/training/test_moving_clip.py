"""A clip that moves, by a schedule or after the norms, within the ε of one that stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd import load_checkpoint, make_private, save_checkpoint
from shuffled_dpsgd.core.noise import GaussianNoise
from shuffled_dpsgd.errors import InvalidArgumentError, RefereeError
from shuffled_dpsgd.training import PrivateTraining
from shuffled_dpsgd.training.moving_clip import COORDINATE, coordinate_share, gradient_clip

RECORDS, BATCH = 60, 20
pytestmark = pytest.mark.filterwarnings("ignore:the loss is not checked")


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, 5.0 * x.sum(1))


def private(lr: float = 0.0, **options: Any) -> PrivateTraining:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    usual: dict[str, Any] = {
        "dataset_size": RECORDS, "expected_batch_size": BATCH, "num_steps": 60, "delta": 1e-3,
        "noise_multiplier": 1.0, "seed": 0,
    }  # fmt: skip
    return make_private(model, torch.optim.SGD(model.parameters(), lr=lr), **usual | options)


def losses(run: PrivateTraining, batch: Any) -> Tensor:
    return (run.model(batch.x).squeeze(1) - batch.y).square()


def train(run: PrivateTraining, steps: int) -> list[float]:
    clips = []
    for batch in run.batches(data(), num_steps=steps):
        clips.append(run.moving_clip.clip_norm)
        run.backward(losses(run, batch))
        run.step()
    return clips


@pytest.mark.parametrize("quantile", [0.3, 0.7])
def test_the_clip_finds_its_quantile_of_the_norms(quantile: float) -> None:
    run = private(clip_quantile=quantile)
    clips = train(run, 60)
    norms = torch.cat([_norm(run.model, x, y)[None] for x, y in data()])
    share = float((norms <= clips[-1]).double().mean())
    assert abs(share - quantile) < 0.2
    assert clips[-1] > 3.0
    assert run.referee.checks.sums >= 3


def test_it_costs_nothing_and_the_card_says_it() -> None:
    still, following = private(), private(clip_quantile=0.5)
    for run in (still, following):
        train(run, 2)
    assert following.epsilon.epsilon == still.epsilon.epsilon
    assert "follows the norms, so that 50% of the records are below it" in str(following.card())
    assert "follows the norms" not in str(still.card())
    assert "attained" not in "\n".join(following.card().certified_lines)


@pytest.mark.filterwarnings("ignore:losses are")
def test_a_record_moves_gradient_and_count_together_by_the_clip_at_most() -> None:
    """Seen before the noise: one record more, clipped or not, moves what is released by C."""
    run = private(clip_quantile=0.5, clip_norm=2.0, noise_multiplier=1.5)
    share, clip = coordinate_share(run.plan), gradient_clip(run.plan)
    assert share == pytest.approx(0.3)
    assert math.hypot(share * 2.0, clip) == pytest.approx(2.0)
    for scale in (1e-3, 1.0, 1e3, math.inf):
        engine = run.engine
        with engine:
            output = run.model(torch.ones(1, 4)).squeeze(1)
            engine.backward(run.moving_clip.scaled(output * scale, 1))
            sums = run.moving_clip.counted(engine).clipped_sum()
            moved = torch.cat([part.flatten() for part in sums.values()]).norm()
            assert float(moved) <= 2.0 * (1 + 1e-6)
            assert float(sums[COORDINATE]) == pytest.approx(0.6 if scale == 1e-3 else -0.6)
            run.discard()


def test_noise_reaches_the_count_and_its_bound_is_the_joint_one() -> None:
    run = private(clip_quantile=0.5)
    stds: list[dict[str, float]] = []
    add = GaussianNoise().add_
    run.mechanism.noise = type(  # type: ignore[attr-defined]
        "Watched",
        (),
        {"add_": lambda _, sums, given, **rest: (stds.append(given), add(sums, given, **rest))[1]},
    )()
    train(run, 1)
    assert stds[0][COORDINATE] == stds[0]["weight"] == 1.0
    with pytest.raises(RefereeError, match="no clipped sum can have"):
        run.referee.check_bound(BATCH * 1.01, count=BATCH)
    run.referee.check_bound(BATCH * 1.0, count=BATCH)


def test_a_schedule_scales_clip_and_noise_and_keeps_epsilon() -> None:
    """At a tenth of the clip the same seed releases a tenth, where every record is clipped."""
    released = []
    for clip in (0.5, 0.05):
        run = private(lr=1.0)
        run.set_clip_norm(clip)
        before = run.model.weight.detach().clone()
        train(run, 1)
        released.append(run.model.weight.detach() - before)
        assert run.last_metrics is not None
        assert run.last_metrics.clipped_share == 1.0
    torch.testing.assert_close(released[1], released[0] / 10, rtol=1e-4, atol=1e-7)
    assert run.epsilon.epsilon == private().plan.certified().epsilon  # type: ignore[union-attr]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="clip_quantile: expected a number in"):
        private(clip_quantile=1.5)
    for options, match in (
        ({"clip": "automatic"}, "clip_quantile: expected flat"),
        ({"shuffle": "every-step", "noise_frame": "unshuffled"}, "expected shuffled"),
        ({"noise": "banded", "bands": 2}, "expected independent"),
        ({"accounting": "paper", "batch_clip_norm": 1.0, "unshuffled_noise_multiplier": 1.0},
         "clip_quantile: expected certified or rdp"),
        ({"method": "non-private", "noise_multiplier": None}, "clip_norm: expected a clip to"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=match):
            private(clip_quantile=0.5, **options)
    run = private(clip_quantile=0.5)
    with pytest.raises(InvalidArgumentError, match="yours to set, between two steps"):
        run.set_clip_norm(2.0)
    batches = run.batches(data())
    losses(run, next(batches)).sum().backward()
    with pytest.raises(InvalidArgumentError, match=r"private\.backward"):
        run.step()
    assert run.ledger.spent == 0
    run.close()
    run = private()
    batches = run.batches(data())
    run.backward(losses(run, next(batches)))
    with pytest.raises(InvalidArgumentError, match="a step that has begun"):
        run.set_clip_norm(2.0)


def test_it_resumes_with_its_clip(tmp_path: Path) -> None:
    whole = private(lr=0.1, clip_quantile=0.5)
    train(whole, 3)
    save_checkpoint(whole, tmp_path)
    train(whole, 3)
    resumed = private(lr=0.1, clip_quantile=0.5)
    load_checkpoint(resumed, tmp_path)
    train(resumed, 3)
    assert resumed.moving_clip.level == whole.moving_clip.level != 1.0
    assert torch.equal(resumed.model.weight, whole.model.weight)


def _norm(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x[None]).squeeze() - y).square()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads]).norm()
