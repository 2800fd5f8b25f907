"""Whole runs in isolation: the paper's claim for a run, and a certified one, on trial."""

from __future__ import annotations

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.audits.composition import (
    CompositionSetting,
    audit_composition,
    privacy_losses,
    run_claims,
)

VIT = {
    "sampling_prob": 0.02,
    "num_steps": 500,
    "delta": 5e-6,
    "dimension": 85_800_000,
    "batch_clip": 1.0,
}


def audit(noise_multiplier: float, claimed: float, **changes):
    setting = CompositionSetting(noise_multiplier=noise_multiplier, **{**VIT, **changes})
    return audit_composition(setting, run_claims(setting, paper_epsilon=claimed))


def test_the_papers_run_is_refuted_by_axis_sums_and_not_by_a_fixed_index() -> None:
    report = audit(0.273, 1.0, num_observations=2000)
    certified, paper = report.verdicts
    assert certified.outcome == "consistent"
    assert certified.claim.epsilon == pytest.approx(108, abs=2)
    assert paper.outcome == "refuted at 95 %"
    assert paper.strongest_attack == "axis sum, every step (constant-on-axis)"
    fixed = next(a for a in report.attacks if a.evidence.adversary.startswith("fixed index"))
    assert all(b.epsilon < 0.3 for b in fixed.bounds if b.confidence is not None)


@pytest.mark.slow
def test_a_run_certified_for_one_survives_and_the_audit_comes_close() -> None:
    report = audit(1.95, 1.0, num_observations=20_000)
    assert not report.refutes_a_proven_claim
    assert 0.1 < report.verdicts[0].strongest_bound < report.verdicts[0].claim.epsilon <= 1.001


def test_privacy_losses_average_to_one_without_the_canary() -> None:
    """E[ratio] = 1 in the world without: the likelihood ratio is exact."""
    setting = CompositionSetting(noise_multiplier=2.0, **{**VIT, "num_steps": 20})
    rng = np.random.default_rng(0)
    losses = privacy_losses(setting, 0.1, rng, present=False)
    assert np.exp(losses).mean() == pytest.approx(1.0, abs=0.02)
    assert privacy_losses(setting, 0.1, rng, present=True).mean() > losses.mean()
    assert np.isfinite(privacy_losses(setting, 1.0, rng, present=True)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sampling_prob", 0.0), ("noise_multiplier", 0.0), ("num_steps", 0), ("axis_size", 1)],
)
def test_bad_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        CompositionSetting(**{"noise_multiplier": 1.0, **VIT, name: value})
