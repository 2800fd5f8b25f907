"""Shuffling changes nothing: not the loss curve, not the distribution of what is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from shuffled_dpsgd.auditing.taps import Unwatched
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.permutation import Permutation, apply, apply_to_tensors, draw, identity
from shuffled_dpsgd.training import GaussianNoise, ShuffledGaussianMechanism, make_private
from slow_cases import one_in
from training.cases import Case, bert_case, distance, gpt2_case, run, vit_case, weights

CASES = {"vit": vit_case, "bert": bert_case, "tied gpt2": gpt2_case}
PRIVATE = {"noise_multiplier": 1.0, "clip_norm": 1.0, "batch_clip_norm": 2.0}
NON_PRIVATE = {"noise_multiplier": 0.0, "clip_norm": 1e6}


def start(case: Case, **changes: Any) -> Any:
    model = case.make()
    settings: dict[str, Any] = {
        "dataset_size": len(case.data),
        "expected_batch_size": 10,
        "num_steps": 6,
        "delta": 1e-3,
        "seed": 7,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return make_private(model, optimizer, **(settings | changes))


@pytest.mark.parametrize(
    ("privacy", "scope"),
    [
        pytest.param(PRIVATE, "full", id="dp-full"),
        pytest.param(NON_PRIVATE, "paper", id="non-dp-paper", marks=pytest.mark.slow),
        pytest.param(PRIVATE, "paper", id="dp-paper", marks=pytest.mark.slow),
        pytest.param(NON_PRIVATE, "full", id="non-dp-full", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES)
def test_loss_curve_is_that_of_the_unshuffled_run(
    make_case: Callable[[torch.dtype], Case], privacy: dict[str, float], scope: str
) -> None:
    """The paper's Table 2, with noise drawn in the un-permuted frame."""
    case = make_case(torch.float64)
    plain = start(case, shuffle="off", scope=scope, **privacy)
    shuffled = start(case, shuffle="every-step", noise_frame="unshuffled", scope=scope, **privacy)
    expected, found = run(plain, case), run(shuffled, case)
    assert found == pytest.approx(expected, rel=1e-9)
    assert distance(weights(shuffled.model), weights(plain.model)) > 1e-3
    apply(shuffled.frame.inverse(), shuffled.model)
    assert distance(weights(shuffled.model), weights(plain.model)) < 1e-7


def test_without_the_common_frame_the_curves_part() -> None:
    """The test above can fail: noise in the permuted frame agrees in distribution only."""
    case = vit_case(torch.float64)
    plain = run(start(case, shuffle="off", **PRIVATE), case)
    shuffled = run(start(case, shuffle="every-step", **PRIVATE), case)
    assert shuffled != pytest.approx(plain, rel=1e-4)


class PulledBackNoise:
    """Noise of a shuffled run, carried back to the frame of the unshuffled one."""

    def __init__(self, inner: GaussianNoise, frames: list[Permutation]) -> None:
        self._inner = inner
        self._frames = iter(frames)

    def add_(
        self,
        tensors: Mapping[str, torch.Tensor],
        stds: Mapping[str, float],
        *,
        key: bytes,
        places: Mapping[str, Place] | None = None,
        divide_by: float = 1.0,
    ) -> None:
        frame = next(self._frames)
        apply_to_tensors(frame, tensors)
        self._inner.add_(tensors, stds, key=key, places=places, divide_by=divide_by)
        apply_to_tensors(frame.inverse(), tensors)


@pytest.mark.parametrize("make_case", one_in(2, CASES.values()))
def test_every_step_and_at_release_have_the_same_distribution(
    make_case: Callable[[torch.dtype], Case],
) -> None:
    """An exact coupling: same batches, noise z_t against F_t^-1 z_t, release by F_T.

    Spherical noise has the same law as its permuted copy and F_T is uniform, independent of the
    noise carried back; so equal outcomes under the coupling prove equal distributions.
    """
    case = make_case(torch.float64)
    every = start(case, shuffle="every-step", **PRIVATE)
    run(every, case)
    every.release()

    later = start(case, shuffle="at-release", **PRIVATE)
    frames = [identity(later.spec)]
    for step in range(later.plan.num_steps):
        drawn = draw(later.spec, every.streams.key("permutation", step))
        frames.append(frames[-1].then(drawn))
    noise = PulledBackNoise(GaussianNoise(), frames)
    later.mechanism = ShuffledGaussianMechanism(later.plan, noise)
    later.referee = Unwatched()
    run(later, case)
    assert distance(weights(every.model), weights(later.model)) > 1e-3
    apply(frames[-1], later.model, later.optimizer)
    assert distance(weights(every.model), weights(later.model)) < 1e-7


def test_release_moves_the_weights_once_and_keeps_the_function() -> None:
    case = vit_case(torch.float64)
    private = start(case, shuffle="at-release", **PRIVATE)
    run(private, case)
    images = case.data.tensors[0]
    with torch.no_grad():
        outputs = private.model(images).logits
    before = weights(private.model)
    private.release()
    after = weights(private.model)
    private.release()
    assert distance(before, after) > 1e-3
    assert distance(after, weights(private.model)) == 0.0
    with torch.no_grad():
        assert torch.allclose(private.model(images).logits, outputs, rtol=1e-10, atol=1e-12)
