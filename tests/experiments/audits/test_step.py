"""One step in isolation: the figures of docs/auditing.md, and the samplers behind them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, norm

from auditing.known import gaussian
from shuffled_dpsgd.accounting import PrivacyClaim, certified_claim
from shuffled_dpsgd.auditing.estimators import OrderStatistics
from shuffled_dpsgd.auditing.plots import save
from shuffled_dpsgd.auditing.verdict import GAUSSIAN, AuditReport, judge
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.audits import axis
from shuffled_dpsgd_experiments.audits.paper_audit import PaperSetting, paper_audit
from shuffled_dpsgd_experiments.audits.step import StepSetting, audit_step, step_claims

# Re-aligning 16 rows is as easy as 64, of which the page tells.
PAPER = StepSetting(noise_multiplier=0.274, dimension=85_800_000, delta=2.5e-7, aligned_rows=16)


@pytest.fixture(scope="module")
def paper_step() -> AuditReport:
    return audit_step(PAPER, step_claims(PAPER, paper_epsilon=0.198))


def bound(report: AuditReport, label: str, method: str = "clopper-pearson") -> float:
    (attack,) = [attack for attack in report.attacks if attack.label == label]
    (found,) = [one for one in attack.bounds if one.method == method]
    return found.epsilon


@pytest.mark.parametrize(
    ("label", "low", "high"),
    [
        ("fixed index (dirac)", 0.0, 0.05),
        ("orbit maximum (dirac)", 2.6, 3.6),
        ("orbit likelihood ratio (dirac)", 2.6, 3.7),
        ("axis sum (constant-on-axis)", 4.8, 6.3),
        ("un-permuted tensor (random-direction)", 4.8, 6.3),
        ("re-alignment against W_t (random-direction)", 4.8, 6.3),
    ],
)
@pytest.mark.slow
def test_the_papers_noise(paper_step: AuditReport, label: str, low: float, high: float) -> None:
    assert low <= bound(paper_step, label) <= high


def test_the_papers_claim_is_refuted_and_the_certified_one_is_not(paper_step: AuditReport) -> None:
    certified, paper = paper_step.verdicts
    assert (certified.claim.kind, certified.outcome) == ("proven", "consistent")
    assert (paper.claim.kind, paper.outcome) == ("heuristic", "refuted at 95 %")
    assert not paper_step.refutes_a_proven_claim
    assert certified.strongest_bound > 0.5 * certified.claim.epsilon


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_refutes_a_certified_step(seed: int) -> None:
    """σ = 1.95 is certified for ε = 1 over 500 steps at q = 0.02."""
    setting = StepSetting(
        noise_multiplier=1.95,
        dimension=85_800_000,
        delta=2.5e-7,
        axis_size=256,
        aligned_rows=16,
        seed=seed,
    )
    report = audit_step(setting, step_claims(setting))
    assert not report.refutes_a_proven_claim


def test_too_little_noise_does_refute_a_proven_claim(paper_step: AuditReport) -> None:
    """The audit can fail us: a proven claim made for twice the noise does not survive."""
    generous = StepSetting(noise_multiplier=0.548, dimension=85_800_000, delta=2.5e-7)
    verdicts = judge(step_claims(generous, paper_epsilon=1.0), paper_step.attacks)
    assert verdicts[0].refuted


@pytest.mark.slow
def test_seeds_reproduce_and_differ() -> None:
    small = {"noise_multiplier": 1.0, "dimension": 1000, "delta": 1e-5, "axis_size": 64}
    claims = step_claims(StepSetting(**small))
    one, same, other = (
        audit_step(StepSetting(**small, num_observations=400, seed=seed), claims).to_json()
        for seed in (1, 1, 2)
    )
    assert one["attacks"] == same["attacks"]
    assert one["attacks"] != other["attacks"]


def test_orbit_maximum_is_the_best_placement() -> None:
    from itertools import permutations

    rng = np.random.default_rng(0)
    canary = axis.random_direction(5, rng)
    observed = rng.standard_normal((20, 5))
    best = [max(row @ canary.vector[list(p)] for p in permutations(range(5))) for row in observed]
    np.testing.assert_allclose(axis.orbit_maximum(observed, canary, 1.0), best)


def test_likelihood_ratio_is_exact() -> None:
    rng = np.random.default_rng(0)
    canary, noise = axis.dirac(7), 0.5
    observed = rng.standard_normal((10, 7))
    density = norm(scale=noise).pdf
    expected = [
        np.mean([np.prod(density(row - np.eye(7)[i])) for i in range(7)]) / np.prod(density(row))
        for row in observed
    ]
    found = axis.orbit_likelihood_ratio(observed, canary, noise)
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-9)
    with pytest.raises(InvalidArgumentError, match="Dirac"):
        axis.orbit_likelihood_ratio(observed, axis.constant(7), noise)


def test_axis_sums_ignore_permutations_and_fixed_indices_do_not() -> None:
    rng = np.random.default_rng(0)
    constant, given = axis.constant(9), axis.random_direction(9, rng)
    row = rng.standard_normal((1, 9))
    moved = row[:, rng.permutation(9)]
    assert axis.axis_sum(row, constant, 1.0) == pytest.approx(axis.axis_sum(moved, constant, 1.0))
    assert axis.at_fixed_index(row, axis.dirac(9), 1.0) == row[:, 0]
    assert axis.matched_filter(row, given, 1.0)[0] == pytest.approx(float(row[0] @ given.vector))


@pytest.mark.parametrize("name", ["dirac", "constant", "random"])
def test_placing_a_canary_keeps_its_values(name: str) -> None:
    rng = np.random.default_rng(0)
    canary = {
        "dirac": axis.dirac(6),
        "constant": axis.constant(6),
        "random": axis.random_direction(6, rng),
    }[name]
    placed = axis.place(canary, 50, rng, permuted=True)
    np.testing.assert_allclose(np.sort(placed, axis=1), np.tile(np.sort(canary.vector), (50, 1)))
    assert np.linalg.norm(placed, axis=1) == pytest.approx(np.ones(50))
    still = axis.place(canary, 3, rng, permuted=False)
    np.testing.assert_array_equal(still, np.tile(canary.vector, (3, 1)))


def test_bad_settings_are_refused() -> None:
    for name in ("noise_multiplier", "batch_clip"):
        with pytest.raises(InvalidArgumentError, match=name):
            StepSetting(**{"noise_multiplier": 1.0, "dimension": 10, "delta": 1e-5, name: 0.0})
    with pytest.raises(InvalidArgumentError, match="num_observations"):
        StepSetting(noise_multiplier=1.0, dimension=10, delta=1e-5, num_observations=10)


def test_verdicts_need_bounds_at_the_claims_delta(paper_step: AuditReport) -> None:
    other = PrivacyClaim(epsilon=1.0, delta=1e-3, method="elsewhere", kind="heuristic")
    with pytest.raises(InvalidArgumentError, match="claims"):
        judge([other], paper_step.attacks)


def test_gaussian_bounds_only_refute_proven_claims_about_their_own_mechanism() -> None:
    certified, paper = step_claims(PAPER, paper_epsilon=0.198)
    pair = gaussian(2.0, 1e-5).scores(np.random.default_rng(0), 200)
    bound = GAUSSIAN.lower_bound(pair, delta=PAPER.delta)
    assert bound.refutes_such(certified)
    assert not bound.refutes_such(paper)
    run = certified_claim(noise_multiplier=2.0, sampling_prob=0.1, num_steps=10, delta=1e-5)
    assert not bound.refutes_such(run)
    same = OrderStatistics(family="gaussian", sampling_prob=0.1, num_steps=10)
    assert same.lower_bound(pair, delta=1e-5).refutes_such(run)
    assert OrderStatistics().lower_bound(pair, delta=1e-5).refutes_such(paper)


def test_the_papers_table_is_within_noise_and_its_bound_is_zero() -> None:
    rows = paper_audit(PaperSetting(repetitions=40))
    assert [row["printed_in_the_paper"] for row in rows] == [0.4771, 0.7005]
    assert rows[0]["noise_multiplier"] == pytest.approx(0.274, abs=1e-3)
    assert rows[0]["step_epsilon"]["epsilon"] == pytest.approx(0.198, abs=1e-3)
    for row in rows:
        strict, literal = (row["readings"][name] for name in ("strict", "literal"))
        low, _, high = strict["quantiles_on_pure_noise"]
        assert low < row["printed_in_the_paper"] < high
        assert strict["share_infinite_on_pure_noise"] == 0.0
        assert literal["share_infinite_on_pure_noise"] > 0.4
        world = "observations_in_each_world"
        assert literal[world] == 2 * strict[world]
        assert row["clopper_pearson"]["epsilon"] == pytest.approx(0.0, abs=0.05)
        assert row["order_statistics"]["epsilon"] == pytest.approx(0.0, abs=0.05)
        assert "confidence interval" in " ".join(row["lacks"])
    assert [row["readings"]["literal"]["dropped"] for row in rows] == ["both", "nothing"]


@pytest.mark.slow
def test_curves_are_drawn(paper_step: AuditReport, tmp_path) -> None:
    written = save(paper_step, tmp_path / "curves")
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert all(path.stat().st_size > 10_000 for path in written)


@pytest.mark.slow
def test_verdicts_on_a_true_claim_keep_their_joint_level() -> None:
    """200 whole tables at noise where the Gaussian bound is tight: the proven claim may fall in
    5 % of them at most, whatever the number of rows."""
    wrong = 0
    for seed in range(200):
        setting = StepSetting(
            noise_multiplier=0.6,
            dimension=10_000,
            delta=1e-5,
            axis_size=64,
            aligned_rows=8,
            aligned_width=8,
            num_observations=600,
            seed=seed,
        )
        wrong += audit_step(setting, step_claims(setting)).refutes_a_proven_claim
    assert wrong <= binom.ppf(0.999, 200, 0.05)
