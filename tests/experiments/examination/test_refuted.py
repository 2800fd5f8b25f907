"""The theorem fails on pairs that it admits; docs/claims.md tells it as prose."""

from __future__ import annotations

import pytest

from shuffled_dpsgd.accounting import calibrate_paper
from shuffled_dpsgd_experiments.examination.exact import Examination, examine_pair
from shuffled_dpsgd_experiments.examination.pairs import constant_pair, spike_pair

VIT = {"delta": 5e-6, "sampling_prob": 0.02, "num_steps": 500}
D_VIT = 85_800_000


def examine(dimension: int, batch_clip: float, draws: int = 8000) -> Examination:
    step = calibrate_paper(epsilon=1.0, dimension=dimension, batch_clip=batch_clip, **VIT)
    return examine_pair(
        spike_pair(dimension, batch_clip),
        noise_multiplier=step.noise_multiplier,
        step_epsilon=step.step_epsilon,
        step_delta=step.step_delta,
        draws=draws,
    )


def test_the_theorem_fails_on_its_own_worst_case_pair() -> None:
    """ViT, ε = 1, c' = c: said to be (0.36, 2.5e-7) a step; the truth is about 0.8."""
    found = examine(D_VIT, 1.0)
    forward, backward = found.truth
    assert forward.delta == pytest.approx(0.80, abs=0.02)
    assert backward.delta == pytest.approx(0.82, abs=0.025)
    assert found.claimed_delta == pytest.approx(2.5e-7, rel=1e-3)
    assert min(forward.low, backward.low) > 1e6 * found.claimed_delta
    assert found.verdict == "claim refuted"


@pytest.mark.parametrize(("batch_clip", "truth"), [(1.0, 0.686), (10.0, 0.265)])
def test_it_fails_at_ten_thousand_coordinates_too(batch_clip: float, truth: float) -> None:
    found = examine(10**4, batch_clip, draws=20_000)
    assert max(each.delta for each in found.truth) == pytest.approx(truth, abs=0.012)
    assert found.refuted


def test_constant_vectors_keep_everything() -> None:
    noise = calibrate_paper(epsilon=1.0, dimension=D_VIT, batch_clip=1.0, **VIT).noise_multiplier
    found = examine_pair(
        constant_pair(D_VIT, 1.0), noise_multiplier=noise, step_epsilon=0.36, step_delta=2.5e-7
    )
    assert found.truth[0].delta > 0.9
    assert found.refuted
