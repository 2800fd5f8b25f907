"""Banded noise: its definition, its covariance, what it costs, and audits of it gone wrong."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shuffled_dpsgd import make_private
from shuffled_dpsgd.accounting.banded import (
    SIZES,
    banded_noise,
    best_banded,
    best_rows,
    noise_of_sum,
)
from shuffled_dpsgd.auditing.estimators import ClopperPearson
from shuffled_dpsgd.auditing.estimators.scores import ScorePair
from shuffled_dpsgd.core.banded import sensitivity
from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.noise import GaussianNoise, Place, normal
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.core.run import train
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.errors import InvalidArgumentError, RefereeError
from shuffled_dpsgd.training import PrivateTraining, load_checkpoint, save_checkpoint
from slow_cases import one_in
from training.cases import Case, bert_case, mlp_case
from training.test_units import distance, run, sgd

SETTINGS = [
    (size, batch, steps, epsilon, bands)
    for size, batch, steps in ((67_349, 500, 60), (50_000, 1000, 120), (1_000_000, 4096, 100))
    for epsilon in (1.0, 3.0, 8.0)
    for bands in (2, 4, 8)
][:20]


def plan(rows: Any, size: int = 1, noise: float = 1.0, **changes: Any) -> PrivacyPlan:
    block = NoiseBlock(name="rest", parameters=("w",), dimension=size, noise_multiplier=noise)
    usual: dict[str, Any] = {
        "dataset_size": 100, "expected_batch_size": 1, "num_steps": 8, "delta": 1e-3,
        "clip_norm": 1.0, "blocks": (block,), "noise_rows": rows,
    }  # fmt: skip
    return PrivacyPlan(**(usual | changes))


def block_of_noise(rows: Any, size: int, keys: list[bytes], noise: float = 1.0) -> np.ndarray:
    """What the mechanism adds in the steps of one block, by coordinate."""
    mechanism = ShuffledGaussianMechanism(plan(rows, size, noise), GaussianNoise())
    found = []
    for place, key in enumerate(keys):
        sums = {"w": torch.zeros(size, dtype=torch.float64)}
        mechanism.privatize(sums, key=key, earlier=keys[:place])
        found.append(sums["w"].numpy())
    return np.array(found)


def keys(count: int) -> list[bytes]:
    streams = RandomStreams(seed=5)
    return [streams.key("noise", step) for step in range(count)]


def test_the_noise_is_its_definition() -> None:
    rows = best_rows(4, 10)
    found = block_of_noise(rows, 40, keys(4), noise=1.7)
    drawn = np.array([[normal(key, Place(0, j), wide=True) for j in range(40)] for key in keys(4)])
    expected = 1.7 * sensitivity(rows) * np.array(rows) @ drawn
    assert np.abs(found - expected).max() < 1e-12


def test_covariance_over_a_million_draws() -> None:
    rows, count = best_rows(4, 25), 1_000_000
    found = block_of_noise(rows, count, keys(4))
    scaled = sensitivity(rows) * np.array(rows)
    expected = scaled @ scaled.T
    # Of a product of normals: (Σ_ii Σ_jj + Σ_ij²) / n.
    error = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / count)
    assert np.abs((found @ found.T / count - expected) / error).max() < 5.0


@pytest.mark.parametrize(("bands", "blocks"), [(2, 30), (4, 15), (8, 100), (32, 8)])
def test_rows_have_columns_of_norm_one_and_nothing_near_is_better(bands: int, blocks: int) -> None:
    rows = np.array(best_rows(bands, blocks))
    inverse = np.linalg.inv(rows)
    assert np.abs(np.linalg.norm(inverse, axis=0) - 1.0).max() < 1e-9
    assert (np.diag(rows) > 0).all()

    def objective(factor: np.ndarray) -> float:
        cumulated = np.tril(np.ones((bands, bands))) @ np.linalg.inv(factor)
        ends = np.square(cumulated).sum(axis=1)
        return float((blocks - 1) / 2 * ends[-1] + ends.mean())

    rng = np.random.default_rng(0)
    for _ in range(20):
        other = inverse + 1e-3 * np.tril(rng.standard_normal(inverse.shape))
        assert objective(other / np.linalg.norm(other, axis=0)) >= objective(inverse)


@pytest.mark.parametrize(
    "rows", [[[1.0, 0.0]], [[1.0, 2.0], [0.0, 1.0]], [[0.0]], [[1e-9, 0], [1, 1.0]]]
)
def test_rows_without_a_certain_inverse_are_refused(rows: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="noise_rows"):
        sensitivity(rows)


def test_no_record_joins_a_block_twice_and_all_places_are_alike() -> None:
    known: dict[str, Any] = {"dataset_size": 60, "sampling_prob": 0.1}
    sampler = PoissonSampler(**known, streams=RandomStreams(seed=1), bands=4)
    places: Counter[int] = Counter()
    joined = 0
    for block in range(800):
        drawn = [sampler.indices(4 * block + place).tolist() for place in range(4)]
        everyone = [record for part in drawn for record in part]
        assert len(everyone) == len(set(everyone))
        joined += len(everyone)
        places.update({place: len(part) for place, part in enumerate(drawn)})
    expected = 800 * 60 * 0.4
    assert abs(joined - expected) < 5 * math.sqrt(expected * 0.6)
    assert max(abs(count - joined / 4) for count in places.values()) < 5 * math.sqrt(joined / 4)


def test_without_a_seed_a_block_stays_as_it_was_drawn_while_its_steps_are_released() -> None:
    released: Counter[int] = Counter()
    streams = RandomStreams(releases=lambda step: released[step])
    sampler = PoissonSampler(dataset_size=60, sampling_prob=0.2, streams=streams, bands=4)
    for block in range(50):
        everyone = []
        for place in range(4):
            everyone += sampler.indices(4 * block + place).tolist()
            released[4 * block + place] += 1
        assert len(everyone) == len(set(everyone))


@pytest.mark.parametrize("setting", one_in(4, SETTINGS))
def test_the_price_is_dp_accountings_of_blocks(setting: Any) -> None:
    from dp_accounting import dp_event
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    size, batch, steps, epsilon, bands = setting
    (found,) = banded_noise(
        epsilon=epsilon, delta=1e-6, sampling_prob=batch / size, num_steps=steps, bands=bands
    )
    event = dp_event.PoissonSampledDpEvent(
        bands * batch / size, dp_event.GaussianDpEvent(found.noise_multiplier)
    )
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    theirs = accountant.compose(event, math.ceil(steps / bands)).get_epsilon(1e-6)
    assert theirs == pytest.approx(epsilon, rel=3e-3)
    ours = plan(found.rows, noise=found.noise_multiplier, dataset_size=size, num_steps=steps,
                expected_batch_size=batch, delta=1e-6)  # fmt: skip
    claim = ours.certified()
    assert claim is not None
    assert claim.epsilon == pytest.approx(epsilon, rel=2e-3)
    assert claim.epsilon <= epsilon
    assert price(ours.mechanism(), 1e-6, 1e-2, records=2) == math.inf
    assert found.batch_ratio < found.ratio


def test_what_is_left_in_the_weights_is_what_was_promised() -> None:
    rows = best_rows(4, 3)
    streams = [RandomStreams(seed=seed) for seed in range(2)]
    blocks = [
        block_of_noise(rows, 200_000, [each.key("noise", place) for place in range(4)])
        for each in streams
    ]
    left = np.concatenate(blocks)[:6].sum(axis=0)
    assert left.std() == pytest.approx(noise_of_sum(rows, 6), rel=0.01)


def test_blocks_fill_the_run() -> None:
    """No block within √2 of a size that is tried reaches less far beyond the last step."""
    known: dict[str, Any] = {"epsilon": 8.0, "delta": 1.2e-5, "sampling_prob": 1024 / 42_061}
    found = {each.bands: each.ratio for each in banded_noise(**known, num_steps=410)}
    for bands, size in zip(found, SIZES, strict=True):
        near = [b for b in range(2, 410) if 0.5 <= (b / size) ** 2 <= 2.0]
        assert -410 % bands == min(-410 % b for b in near)
    (half_empty,) = banded_noise(**known, num_steps=410, bands=39)
    assert found[41] < 0.95 * half_empty.ratio


def test_it_is_refused_where_it_gains_nothing() -> None:
    found = banded_noise(epsilon=0.5, delta=1e-5, sampling_prob=0.1, num_steps=60)
    with pytest.raises(InvalidArgumentError, match="gains nothing"):
        best_banded(found)
    assert (
        best_banded(banded_noise(epsilon=8.0, delta=1e-5, sampling_prob=0.02, num_steps=64)).ratio
        < 0.7
    )


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_a_block_of_two_costs_no_more_than_its_price(rate: float) -> None:
    """δ(ε) of what is seen of one block, by quadrature over the plane, at four scales of noise."""
    rows = np.array(best_rows(2, 5))
    shifts = np.linalg.inv(rows) / sensitivity(best_rows(2, 5))
    axis = np.linspace(-9.0, 9.0, 721)
    area = (axis[1] - axis[0]) ** 2
    for noise in (0.7, 1.0, 2.0, 4.0):

        def density(mean: np.ndarray) -> np.ndarray:
            one, other = (np.exp(-0.5 * (axis - at) ** 2) for at in mean)
            return np.outer(one, other) / (2.0 * math.pi)

        without = density(np.zeros(2))
        joined = sum(density(shifts[:, place] / noise) for place in range(2))
        present = (1.0 - 2.0 * rate) * without + rate * joined
        claimed = plan(rows, noise=noise, dataset_size=100, expected_batch_size=int(100 * rate),
                       num_steps=2, delta=1e-3).certified()  # fmt: skip
        assert claimed is not None
        true = max(
            float(np.maximum(p - math.exp(claimed.epsilon) * q, 0.0).sum()) * area
            for p, q in ((present, without), (without, present))
        )
        assert 0.3e-3 < true <= 1e-3 * (1 + 1e-4)


# --- audits ---


def scores(*, wrong: str = "", present: bool, noise: float, trials: int) -> np.ndarray:
    """Log-likelihood ratios of one block of two steps; a record adds one wherever it joins.

    `wrong` plants a bug: a record may join both steps, as it may if blocks of draws begin a step
    before those of noise; the row of the last step is taken for both; or the second draw is the
    first once more. The attacker of what is certified knows the place the record would take.
    """
    rows, rate = best_rows(2, 20), 0.5
    scale = sensitivity(rows)
    if wrong == "row of another step":
        rows = ((rows[1][1], 0.0), rows[1])
    matrix = np.array(rows)
    rng = np.random.default_rng(int(present))
    drawn = keys(2) if wrong != "draw reused" else [keys(1)[0]] * 2
    added = block_of_noise(rows, trials, drawn, noise) * (scale / sensitivity(rows))
    joins = np.zeros((2, trials))
    places = rng.integers(2, size=trials)
    if wrong == "both steps":
        joins[:] = rng.random((2, trials)) < rate
    else:
        joins[places, np.arange(trials)] = rng.random(trials) < 2 * rate
    inverse = np.linalg.inv(matrix) / scale
    seen = inverse @ (added + joins * present)
    if wrong == "draw reused":
        # What both steps have in common is known; the difference has no noise at all.
        return np.abs(seen[1] - seen[0] * (seen[1].std() / seen[0].std()))
    shift = inverse[:, places] if wrong != "both steps" else inverse.sum(axis=1)[:, None]
    return (seen * shift).sum(axis=0) / noise**2 - 0.5 * (shift**2).sum(axis=0) / noise**2


WRONG = ("both steps", "row of another step", "draw reused")


def audited(wrong: str = "") -> tuple[float, float]:
    """The bound that an audit of a block shows, and the certified ε."""
    noise, trials, delta = 2.0, 200_000, 1e-2
    found = ScorePair(
        out=scores(wrong=wrong, present=False, noise=noise, trials=trials),
        present=scores(wrong=wrong, present=True, noise=noise, trials=trials),
    )
    bound = ClopperPearson().lower_bound(found, delta=delta, confidence=0.95).epsilon
    claimed = plan(
        best_rows(2, 20), noise=noise, dataset_size=2, num_steps=2, delta=delta
    ).certified()
    assert claimed is not None
    return bound, claimed.epsilon


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_audits_refute_what_went_wrong_and_nothing_else(wrong: str) -> None:
    bound, claimed = audited(wrong)
    assert (bound > claimed) == bool(wrong)
    assert bound > 0.2


# --- runs ---


def banded_run(case: Case, model: nn.Module, **changes: Any) -> PrivateTraining:
    usual: dict[str, Any] = {
        "dataset_size": 40, "expected_batch_size": 4, "num_steps": 7, "delta": 1e-3,
        "noise_multiplier": 0.5, "clip_norm": 0.4, "seed": 3, "shuffle": "off", "noise": "banded",
        "bands": 3, "check_rate": 1.0,
    }  # fmt: skip
    return make_private(model, sgd(model), **(usual | changes))


@pytest.mark.parametrize("make", [mlp_case, bert_case])
def test_a_fast_run_releases_what_the_core_does(make: Any) -> None:
    case = make(torch.float64)
    fast, slow = case.make(), case.make()
    private = banded_run(case, fast)
    run(private, case)

    def loss(model: nn.Module, record: Any) -> torch.Tensor:
        from torch.utils.data import default_collate

        from shuffled_dpsgd.training.data import shaped

        return case.loss(model, shaped(default_collate([record]))).sum()

    card = train(slow, sgd(slow), loss, case.data, private.plan)
    assert distance(fast, slow) < 1e-9
    assert card.certified == private.card().certified
    assert private.referee.checks.noise > 0
    text = str(private.card())
    assert "banded noise in blocks of 3 steps" in text
    assert "the formula needs uncut Poisson batches, a clip and independent noise" in text
    assert "attained" not in text


@pytest.mark.filterwarnings("ignore:losses are multiplied")
def test_with_the_shuffle_noise_cancels_as_without() -> None:
    """No gradients: what is left in the weights is noise alone, where it would lie unpermuted."""
    case = mlp_case(torch.float64)
    models = case.make(), case.make()
    left = []
    for model, shuffle in zip(models, ("off", "every-step"), strict=True):
        for parameter in model.parameters():
            parameter.data.zero_()
        private = banded_run(case, model, shuffle=shuffle, num_steps=6, scope="full")
        assert (private.plan.noise_frame == "unshuffled") == (shuffle == "every-step")
        for batch in private.batches(case.data):
            private.backward(0.0 * case.loss(model, batch))
            private.step()
        left.append(torch.cat([p.detach().flatten() for p in model.parameters()]).sort().values)
    assert torch.allclose(*left, rtol=1e-9)
    assert not torch.equal(models[0][0].weight, models[1][0].weight)


@pytest.mark.filterwarnings("ignore:losses are multiplied")
@pytest.mark.parametrize("seed", [3, None])
def test_the_steps_of_a_run_combine_the_draws_of_their_block(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients weights move by noise alone: by the rows times the draws of these keys."""
    drawn: dict[int, bytes] = {}
    plain = RandomStreams.key

    def key(streams: RandomStreams, purpose: Any, *place: int, **more: Any) -> bytes:
        found = plain(streams, purpose, *place, **more)
        return drawn.setdefault(place[0], found) if purpose == "noise" else found

    case, seen = mlp_case(torch.float64), list[np.ndarray]()
    model = case.make()
    private = banded_run(case, model, seed=seed)
    monkeypatch.setattr(RandomStreams, "key", key)
    for batch in private.batches(case.data):
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
        private.backward(0.0 * case.loss(model, batch))
        private.step()
    assert sorted(drawn) == list(range(7))
    size = seen[0].size
    normals = [[normal(drawn[t], Place(0, j), wide=True) for j in range(size)] for t in range(7)]
    rows, scale = private.plan.noise_rows, 0.5 * 0.4 * sensitivity(private.plan.noise_rows)
    for step, (before, after) in enumerate(pairwise(seen)):
        first, row = step - step % 3, rows[step % 3]
        noise = sum(
            row[place - first] * np.array(normals[place]) for place in range(first, step + 1)
        )
        assert np.abs((before - after) * 4 / 0.3 - scale * noise).max() < 1e-12


def test_a_seeded_run_resumes_bit_for_bit_within_a_block(tmp_path: Path) -> None:
    case = mlp_case(torch.float64)
    whole = case.make()
    run(banded_run(case, whole), case)
    first = banded_run(case, case.make(), ledger_path=tmp_path / "ledger")
    run(first, case, num_steps=4)
    save_checkpoint(first, tmp_path / "checkpoints")
    model = case.make()
    again = banded_run(case, model, ledger_path=tmp_path / "ledger")
    load_checkpoint(again, tmp_path / "checkpoints")
    assert again.steps_taken == 4
    run(again, case)
    assert distance(whole, model) == 0.0


@pytest.mark.parametrize(
    ("saved_at", "died_at", "begins_at"), [(3, 3, 3), (4, 4, 6), (3, 5, 6), (6, 7, 7)]
)
def test_a_secure_run_goes_on_with_the_next_block(
    tmp_path: Path, saved_at: int, died_at: int, begins_at: int
) -> None:
    case = mlp_case(torch.float64)
    secure: dict[str, Any] = {"seed": None, "ledger_path": tmp_path / "ledger"}
    first = banded_run(case, case.make(), **secure)
    run(first, case, num_steps=saved_at)
    save_checkpoint(first, tmp_path / "checkpoints")
    if died_at > saved_at:
        run(first, case, num_steps=died_at - saved_at)
    saved = b"".join(p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file())
    assert not any(key in saved for key in first._door._draws.values())
    again = banded_run(case, case.make(), **secure)
    load_checkpoint(again, tmp_path / "checkpoints")
    assert again.steps_taken == begins_at
    assert again.ledger.spent == begins_at
    if begins_at < 7:
        run(again, case)
    assert again.ledger.spent == 7
    assert again.ledger.repeated_steps == 0


def test_a_block_whose_draws_are_gone_is_not_continued() -> None:
    case = mlp_case(torch.float64)
    private = banded_run(case, case.make(), seed=None)
    run(private, case, num_steps=1)
    assert len(private._door._draws) == 1
    private._door._draws.clear()
    with pytest.raises(RefereeError, match="draws are gone"):
        run(private, case)
    assert private.ledger.spent == 1


def test_keys_are_forgotten_at_the_end_of_their_block() -> None:
    case = mlp_case(torch.float64)
    private = banded_run(case, case.make(), seed=None)
    run(private, case, num_steps=3)
    assert private._door._draws == {}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"accounting": "rdp"}, "accounting='certified'"),
        ({"budget": "b.json"}, "without a budget file"),
        ({"largest_batch": 6}, "with neither"),
        ({"clip_quantile": 0.5}, "the two contradict"),
        ({"bands": 1}, "2 or more"),
        ({"bands": None}, "with epsilon it is chosen"),
        ({"bands": None, "noise_multiplier": None, "epsilon": 0.5}, "gains nothing"),
        ({"noise": "independent"}, "nothing without noise='banded'"),
        ({"bands": 11}, "a probability"),
    ],
)
def test_refused(changes: dict[str, Any], word: str) -> None:
    case = mlp_case(torch.float64)
    with pytest.raises(InvalidArgumentError, match=word):
        banded_run(case, case.make(), **changes)


def test_nothing_is_claimed_for_both() -> None:
    both = replace(plan(best_rows(2, 4)), largest_batch=9)
    assert both.certified() is None
