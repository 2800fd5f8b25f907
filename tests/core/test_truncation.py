"""A largest batch: what is drawn, what it costs, and an audit of a cut that nobody counted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from shuffled_dpsgd import make_private
from shuffled_dpsgd.accounting import SampledGaussian, calibrate_certified
from shuffled_dpsgd.accounting.accountants import accountants
from shuffled_dpsgd.auditing.estimators import ClopperPearson
from shuffled_dpsgd.auditing.estimators.scores import ScorePair
from shuffled_dpsgd.core.certified import claim_for
from shuffled_dpsgd.core.pld import price, steps_of
from shuffled_dpsgd.core.run import train
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.errors import InvalidArgumentError
from slow_cases import one_in
from training.cases import mlp_case
from training.test_units import distance, run, sgd

SETTINGS = [
    (size, batch, ratio, noise, steps, delta)
    for (size, batch, noise, steps, delta) in (
        (67_349, 1000, 0.8, 200, 1e-6),
        (10_000, 400, 1.0, 100, 1e-5),
        (50_000, 1000, 3.0, 500, 1e-6),
        (2_000, 200, 2.0, 50, 1e-4),
        (1_000_000, 4096, 0.7, 240, 1e-7),
    )
    for ratio in (1.01, 1.05, 1.1, 1.2)
]


def cut_run(size: int, batch: int, ratio: float, noise: float, steps: int) -> SampledGaussian:
    return SampledGaussian(
        noise_multiplier=noise,
        sampling_prob=batch / size,
        num_steps=steps,
        largest_batch=math.floor(ratio * batch),
        dataset_size=size,
    )


@pytest.mark.parametrize("setting", one_in(3, SETTINGS))
def test_no_more_than_dp_accounting_and_no_less_than_poisson(setting: Any) -> None:
    """Theirs prices an exchange as a replacement, which is looser than our proof needs."""
    from dp_accounting import dp_event
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    *sizes, delta = setting
    found = cut_run(*sizes)
    ours = price(found, delta, 1e-4)
    plain = price(replace(found, largest_batch=None, dataset_size=None), delta, 1e-4)
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    event = dp_event.TruncatedSubsampledGaussianDpEvent(
        found.dataset_size, found.sampling_prob, found.largest_batch, found.noise_multiplier
    )
    epsilon = theirs.compose(event, found.num_steps).get_epsilon(delta)
    assert plain * (1 - 1e-3) <= ours <= epsilon * 1.002
    if sizes[2] == 1.2 and sizes[1] >= 1000:
        assert ours == pytest.approx(plain, rel=2e-3)


@dataclass(frozen=True)
class Sums:
    """One step on scalars, by every draw and every cut: the density of the sum on a grid."""

    q: float
    most: int
    noise: float
    x = np.linspace(-16.0, 16.0, 4001)

    def density(self, values: list[float]) -> np.ndarray:
        found, size = np.zeros_like(self.x), len(values)
        chances: Counter[float] = Counter()
        for joins in itertools.product((0, 1), repeat=size):
            drawn = [value for value, joined in zip(values, joins, strict=True) if joined]
            chance = self.q ** len(drawn) * (1.0 - self.q) ** (size - len(drawn))
            kept = list(itertools.combinations(drawn, min(len(drawn), self.most)))
            for each in kept:
                chances[round(sum(each), 9)] += chance / len(kept)
        for total, chance in chances.items():
            found += chance * np.exp(-0.5 * ((self.x - total) / self.noise) ** 2)
        return found / (self.noise * math.sqrt(2.0 * math.pi))

    def delta(self, epsilon: float, size: int) -> float:
        """The largest δ of neighbours found: the last record at 1, the others as they hurt most."""
        rng = np.random.default_rng(0)
        others = [[1.0] * k + [-1.0] * (size - 1 - k) for k in range(size)]
        others += [rng.uniform(-1.0, 1.0, size - 1).tolist() for _ in range(3)]
        step, worst = self.x[1] - self.x[0], 0.0
        for values in others:
            p, q = self.density([*values, 1.0]), self.density(values)
            for one, other in ((p, q), (q, p)):
                gap = np.maximum(one - math.exp(epsilon) * other, 0.0)
                worst = max(worst, float(gap.sum() * step))
        return worst


TINY = [
    (6, 1 / 6, 1, 1.0), (5, 0.8, 4, 1.0),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (6, 0.5, 3, 1.0), (6, 0.5, 4, 1.5), (7, 0.3, 3, 0.8), (7, 0.55, 4, 2.0), (8, 0.25, 2, 1.0),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("size", "q", "most", "noise"), TINY)
def test_no_neighbours_of_a_few_records_exceed_the_price(
    size: int, q: float, most: int, noise: float
) -> None:
    """Three δ each; batches of one at most would exceed it if the cut were not counted."""
    sums, found = Sums(q, most, noise), cut_run(size, 1, 1.0, noise, 1)
    found = replace(found, sampling_prob=q, largest_batch=most)
    for delta in (1e-1, 1e-2, 1e-3):
        assert sums.delta(price(found, delta, 1e-4), size) <= delta * (1 + 1e-4)
    if most == 1:
        plain = replace(found, largest_batch=None, dataset_size=None)
        assert sums.delta(price(plain, 1e-2, 1e-4), size) > 1.2e-2


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_one_step_is_the_mixture_by_quadrature(adjacency: Any) -> None:
    """δ(ε) of one step, computed from the densities alone."""
    found = replace(cut_run(1000, 100, 1.05, 0.9, 1), adjacency=adjacency)
    steps = steps_of(found)
    epsilon = max(price(found, 1e-3, 1e-5), 1e-9)
    x = np.linspace(-14, 14, 400_001)
    deltas = []
    for each in steps:
        total = 0.0
        for chance, pair in each.cases:
            sides = []
            for side in (pair.upper, pair.lower):
                terms = np.exp(side.log_weights)[:, None] * np.exp(
                    -0.5 * ((x - side.means[:, None]) / side.noise) ** 2
                )
                sides.append(terms.sum(0) / (side.noise * math.sqrt(2 * math.pi)))
            gap = np.maximum(sides[0] - math.exp(epsilon) * sides[1], 0.0)
            total += chance * float(np.trapezoid(gap, x))
        deltas.append(total)
    assert max(deltas) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("size", "q", "most"), [(67_349, 0.0148, 1100), (500, 0.2, 101)])
def test_the_chance_of_a_cut_is_that_of_mpmath(size: int, q: float, most: int) -> None:
    mpmath = pytest.importorskip("mpmath")
    run = SampledGaussian(
        noise_multiplier=1.0, sampling_prob=q, num_steps=1, largest_batch=most, dataset_size=size
    )
    with mpmath.workdps(60):
        exact = mpmath.betainc(most, size - most + 1, 0, mpmath.mpf(q), regularized=True)
        assert 0 < (steps_of(run)[0].chance - exact) / exact < 2e-6


def test_cuts_are_even_and_seldom() -> None:
    sampler = PoissonSampler(
        dataset_size=30, sampling_prob=0.3, streams=RandomStreams(seed=3), largest_batch=9
    )
    free = PoissonSampler(dataset_size=30, sampling_prob=0.3, streams=RandomStreams(seed=3))
    counts: Counter[int] = Counter()
    for step in range(3000):
        drawn, whole = sampler.indices(step).tolist(), free.indices(step).tolist()
        assert drawn == sorted(set(drawn) & set(whole))
        assert len(drawn) == min(len(whole), 9)
        counts.update(drawn)
    expected = sum(counts.values()) / 30
    assert max(abs(count - expected) for count in counts.values()) < 5 * math.sqrt(expected)


def test_without_a_seed_a_cut_has_a_key_of_its_own() -> None:
    """Drawn and cut by one key, a record that comes early would be kept less often or more."""
    streams = RandomStreams()
    assert streams.key("cut", 3) != streams.key("sampling", 3)
    sampler = PoissonSampler(dataset_size=30, sampling_prob=0.3, streams=streams, largest_batch=9)
    counts = Counter(r for step in range(3000) for r in sampler.indices(step).tolist())
    expected = sum(counts.values()) / 30
    assert max(abs(count - expected) for count in counts.values()) < 5.5 * math.sqrt(expected)


@pytest.mark.parametrize("seed", [3, None])
def test_who_is_kept_has_nothing_to_do_with_who_else_was_drawn(seed: int | None) -> None:
    """Nor with how far from the one before it lies, which the numbers of the draw decide."""
    streams = RandomStreams(seed=seed)
    known: dict[str, Any] = {"dataset_size": 400, "sampling_prob": 0.05, "streams": streams}
    cut, free = PoissonSampler(**known, largest_batch=20), PoissonSampler(**known)
    # Within each draw: larger draws have smaller gaps, and keep fewer of their records.
    found, variance, left_out = 0.0, 0.0, 0
    for step in range(1500):
        kept, whole = set(cut.indices(step).tolist()), free.indices(step).numpy()
        if len(whole) <= 20:
            continue
        gaps = np.diff(whole).astype(float)
        out = np.array([record not in kept for record in whole[1:].tolist()])
        found += float((gaps - gaps.mean())[out].sum())
        variance += out.sum() * (len(out) - out.sum()) / (len(out) - 1) * gaps.var()
        left_out += int(out.sum())
    assert left_out > 500
    assert abs(found) < 5.0 * math.sqrt(variance)


def log_ratios(present: bool, *, q: float, most: int, noise: float, trials: int) -> np.ndarray:
    """How much likelier one step's sum is with the last record than without it.

    It has +1, and all others −1 of the same direction. The attacker knows which others were drawn,
    as every claim allows.
    """
    size = 60
    dataset_size, last = size if present else size - 1, size - 1
    rng, found = np.random.default_rng(int(present)), []
    for seed in range(trials // 100):
        streams = RandomStreams(seed=2 * seed + present)
        known: dict[str, Any] = {"dataset_size": dataset_size, "sampling_prob": q}
        cut = PoissonSampler(**known, streams=streams, largest_batch=most)
        free = PoissonSampler(**known, streams=streams)
        for step in range(100):
            drawn, others = cut.indices(step), int((free.indices(step) != last).sum())
            total = 2.0 * int((drawn == last).sum()) - len(drawn) + noise * rng.standard_normal()
            is_cut = others >= most
            shift, rate = (2.0, q * most / (others + 1)) if is_cut else (1.0, q)
            moved = total + min(others, most)
            odds = math.exp((shift * moved - 0.5 * shift**2) / noise**2)
            found.append(math.log1p(rate * (odds - 1.0)))
    return np.array(found)


def audited() -> tuple[float, float, float]:
    """The bound of an audit, ε without counting the cut, and the certified ε."""
    noise, q, most, delta = 1.0, 0.9, 54, 1e-2
    scores = ScorePair(
        out=log_ratios(False, q=q, most=most, noise=noise, trials=8000),
        present=log_ratios(True, q=q, most=most, noise=noise, trials=8000),
    )
    bound = ClopperPearson().lower_bound(scores, delta=delta, confidence=0.95).epsilon
    found = SampledGaussian(
        noise_multiplier=noise, sampling_prob=q, num_steps=1, largest_batch=most, dataset_size=60
    )
    uncounted = replace(found, largest_batch=None, dataset_size=None)
    return bound, price(uncounted, delta, 1e-3), price(found, delta, 1e-3)


def test_an_audit_refutes_a_cut_that_was_not_counted() -> None:
    bound, uncounted, certified = audited()
    assert uncounted < bound < certified


def test_a_fast_run_releases_what_the_core_does_in_one_shape() -> None:
    case = mlp_case(torch.float64)
    models = [case.make() for _ in range(3)]
    shapes = set()
    for model, pads in zip(models, (False, True), strict=False):
        private = make_private(
            model,
            sgd(model),
            dataset_size=40,
            expected_batch_size=8,
            largest_batch=8,
            num_steps=6,
            delta=1e-3,
            noise_multiplier=0.7,
            clip_norm=0.4,
            seed=2,
            shuffle="off",
        )
        if pads:
            for batch in private.batches(case.data, pad_batches=True):
                shapes.add(tuple(batch.x.shape))
                private.backward(case.loss(model, batch))
                private.step()
        else:
            run(private, case)
    assert len(shapes) == 1

    def loss(model: torch.nn.Module, record: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(record[0][None]), record[1][None])

    card = train(models[2], sgd(models[2]), loss, case.data, private.plan)
    assert distance(models[0], models[2]) < 1e-12
    assert distance(models[1], models[2]) < 1e-12
    assert card.certified == private.card().certified
    assert ", 8 of a larger draw" in str(private.card())
    assert "attained" not in str(private.card())
    known = private.card().certified
    assert known is not None
    assert known.epsilon == claim_for(private.plan.mechanism(), 1e-3).epsilon
    assert private.get_epsilon(1e-2).epsilon < known.epsilon


def test_noise_is_calibrated_to_what_a_cut_costs() -> None:
    known: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "sampling_prob": 0.05, "num_steps": 100}
    plain = calibrate_certified(**known).noise_multiplier
    cut = calibrate_certified(**known, largest_batch=515, dataset_size=10_000)
    assert cut.noise_multiplier > 1.05 * plain
    assert cut.claim.epsilon <= 2.0


def test_who_does_not_know_of_cuts_refuses() -> None:
    found = cut_run(1000, 100, 1.1, 1.0, 10)
    assert price(found, 1e-5, 1e-2, records=2) == math.inf
    for each in accountants(dimension=None, batch_clip=None, delta_split=0.5):
        if each.name != "certified":
            with pytest.raises(InvalidArgumentError, match="largest_batch"):
                each.claim(found, 1e-5)
    for most in (99, 1000):
        with pytest.raises(InvalidArgumentError, match="largest_batch"):
            replace(found, largest_batch=most)
    case = mlp_case(torch.float64)
    for changes in ({"accounting": "rdp"}, {"budget": "b.json"}, {"largest_batch": 4}):
        model = case.make()
        settings: dict[str, Any] = {"largest_batch": 9, "epsilon": 1.0} | changes
        with pytest.raises(InvalidArgumentError, match="largest_batch"):
            make_private(
                model, sgd(model), dataset_size=40, expected_batch_size=8, num_steps=2, delta=1e-3,
                shuffle="off", **settings,
            )  # fmt: skip
