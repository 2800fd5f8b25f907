"""Plans: calibrated, split into blocks, and free of contradictions."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import PrivacyOptions, PrivacyPlan, SpendingCurve, make_plan
from shuffled_dpsgd.training.planning import differences, field_fingerprints, plan_json
from shuffled_dpsgd.training.spending import paper_estimate

SIZES = {"moved": 900_000, "fixed": 1000}
BASE: dict[str, Any] = {
    "dataset_size": 50_000,
    "expected_batch_size": 1000,
    "num_steps": 500,
    "delta": 5e-6,
    "epsilon": 1.0,
    "seed": 0,
}


def plan(**changes: Any) -> PrivacyPlan:
    settings = {key: value for key, value in (BASE | changes).items() if value is not ...}
    return make_plan(PrivacyOptions(**settings), sizes=SIZES, moved=frozenset({"moved"}))


def test_certified_accounting_gives_every_block_the_same_proven_noise() -> None:
    found = plan(batch_clip_norm=1.0)
    assert [block.noise_multiplier for block in found.blocks] == [pytest.approx(1.95, abs=0.01)] * 2
    claim = found.certified()
    assert claim is not None
    assert claim.kind == "proven"
    assert 0.99 < claim.epsilon <= 1.0


def test_paper_accounting_gives_blocks_their_own_noise_and_certifies_the_smallest() -> None:
    found = plan(accounting="paper", batch_clip_norm=1.0)
    shuffled, rest = found.blocks
    assert rest.noise_multiplier == pytest.approx(11.75, rel=1e-3)
    assert shuffled.noise_multiplier < 0.4
    assert (shuffled.batch_clip_norm, rest.batch_clip_norm) == (1.0, None)
    paper, certified = paper_estimate(found), found.certified()
    assert paper is not None
    assert certified is not None
    assert paper.kind == "heuristic"
    assert paper.epsilon == pytest.approx(1.0, rel=2e-3)
    assert paper.inputs["dimension"] == SIZES["moved"]
    assert certified.kind == "proven"
    assert certified.inputs["noise_multiplier"] == shuffled.noise_multiplier
    assert certified.epsilon > 30


def test_batch_clip_is_measured_in_units_of_the_clip() -> None:
    one = plan(accounting="paper", clip_norm=0.1, batch_clip_norm=1.0)
    other = plan(accounting="paper", clip_norm=1.0, batch_clip_norm=10.0)
    assert one.blocks[0].noise_multiplier == other.blocks[0].noise_multiplier
    assert one.blocks[0].noise_std(one.clip_norm) == pytest.approx(
        0.1 * other.blocks[0].noise_std(other.clip_norm)
    )


def test_epochs_count_whole_passes() -> None:
    assert plan(num_steps=..., epochs=10, dataset_size=50_001).num_steps == 10 * 51


def test_spending_grows_and_ends_at_the_target() -> None:
    found = plan(num_steps=40, batch_clip_norm=1.0)
    curve = SpendingCurve(found)
    epsilons = [curve.certified(step).epsilon for step in range(41)]  # type: ignore[union-attr]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] == 0.0
    assert 0.99 < epsilons[-1] <= 1.0 + 1e-9
    assert curve.certified(40) == found.certified()
    for steps in (1, 13, 33):
        shown, exact = curve.certified(steps), found.certified(steps)
        assert exact is not None
        assert shown is not None
        assert exact.epsilon * (1 - 1e-9) <= shown.epsilon <= exact.epsilon * 1.25 + 0.05
        assert shown.inputs["num_steps"] >= steps
    estimates = [curve.paper(step).epsilon for step in range(41)]  # type: ignore[union-attr]
    assert estimates == sorted(estimates)


CONTRADICTIONS = {
    "two budgets": ({"noise_multiplier": 1.0}, "epsilon"),
    "no budget": ({"epsilon": None}, "epsilon"),
    "two lengths": ({"epochs": 3}, "epochs"),
    "no length": ({"num_steps": None}, "epochs"),
    "epsilon of zero": ({"epsilon": 0.0}, "epsilon"),
    "delta of one": ({"delta": 1.0}, "delta"),
    "batch above data": ({"expected_batch_size": 50_001}, "expected_batch_size"),
    "clip of zero": ({"clip_norm": 0.0}, "clip_norm"),
    "clip without bound": ({"clip_norm": math.inf}, "clip_norm"),
    "no clip but a budget": ({"clip": "none"}, "clip"),
    "paper without batch clip": ({"accounting": "paper"}, "batch_clip_norm"),
    "paper without shuffle": (
        {"accounting": "paper", "batch_clip_norm": 1.0, "shuffle": "off"},
        "accounting",
    ),
    "own batches with a budget": ({"sampling": "unaccounted"}, "epsilon"),
    "seed and secure": ({"secure": True}, "secure"),
    "insecure without seed": ({"seed": None, "secure": False}, "seed"),
    "common frame without shuffle": (
        {"shuffle": "off", "noise_frame": "unshuffled"},
        "noise_frame",
    ),
    "second noise without paper": ({"unshuffled_noise_multiplier": 2.0}, "unshuffled"),
    "paper with one noise": (
        {"accounting": "paper", "epsilon": None, "noise_multiplier": 1.0, "batch_clip_norm": 1.0},
        "unshuffled",
    ),
    "unknown shuffle": ({"shuffle": "sometimes"}, "shuffle"),
    "negative noise": ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier"),
}


@pytest.mark.parametrize(("changes", "named"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        plan(**changes)


def test_nothing_to_shuffle_is_refused_unless_shuffling_is_off() -> None:
    request = PrivacyOptions(**(BASE | {"shuffle": "every-step"}))
    with pytest.raises(InvalidArgumentError, match="shuffle='off'"):
        make_plan(request, sizes=SIZES, moved=frozenset())
    for shuffle in ("off", "auto"):
        left_out = dataclasses.replace(request, shuffle=shuffle)
        made = make_plan(left_out, sizes=SIZES, moved=frozenset())
        (block,) = made.blocks
        assert made.shuffle == "off"
        assert block.dimension == sum(SIZES.values())


def test_auto_shuffles_every_step_where_something_moves() -> None:
    assert plan(shuffle="auto").shuffle == "every-step"
    with pytest.raises(InvalidArgumentError, match="shuffle='off'"):
        make_plan(
            PrivacyOptions(**(BASE | {"batch_clip_norm": 1.0})), sizes=SIZES, moved=frozenset()
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling": "unaccounted", "noise_multiplier": 1.0}, "Poisson"),
        ({"noise_multiplier": 0.0}, "no noise"),
        ({"clip": "none", "noise_multiplier": 1.0}, "not clipped"),
    ],
)
def test_runs_that_cannot_be_certified_say_why(changes: dict[str, Any], reason: str) -> None:
    found = plan(epsilon=None, **changes)
    assert found.certified() is None
    assert paper_estimate(found) is None
    assert any(reason in why for why in found.uncertifiable)


def test_plans_are_frozen_and_known_by_everything_that_matters() -> None:
    one = plan(epsilon=None, noise_multiplier=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.delta = 0.1  # type: ignore[misc]
    other = plan(epsilon=None, noise_multiplier=1.0, seed=1)
    assert one.fingerprint() != other.fingerprint()
    assert differences(one, field_fingerprints(other)) == ["seed"]
    assert "seed" not in json.dumps(plan_json(one))
