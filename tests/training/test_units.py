"""Units of several records: as the core defines them, drawn whole, and refused where unclear."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from shuffled_dpsgd import certified_claim, make_private
from shuffled_dpsgd.auditing.estimators import ClopperPearson
from shuffled_dpsgd.auditing.estimators.scores import ScorePair
from shuffled_dpsgd.core.run import train
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import PrivateTraining, load_checkpoint, save_checkpoint
from shuffled_dpsgd.training.data import shaped
from shuffled_dpsgd.training.saved_card import card_from_json
from shuffled_dpsgd.training.units import Units
from training.cases import Case, bert_case, gpt2_case, mlp_case, vit_case

# Of 40 records; the largest unit has seven, some have one.
IDS = [min(index % 13, index % 7 + 3) for index in range(40)]
CASES = [mlp_case, bert_case, gpt2_case, vit_case]


def private_run(case: Case, model: nn.Module, **settings: Any) -> PrivateTraining:
    usual: dict[str, Any] = {
        "dataset_size": len(set(IDS)),
        "expected_batch_size": 5,
        "num_steps": 4,
        "delta": 1e-3,
        "clip_norm": 0.4,
        "noise_multiplier": 0.7,
        "seed": 11,
        "shuffle": "off",
        "unit": IDS[: len(case.data)],
        "records_per_unit": 3,
        "check_rate": 1.0,
        "physical_batch_size": 9,
    }
    return make_private(model, sgd(model), **(usual | settings))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def run(private: PrivateTraining, case: Case, **options: Any) -> None:
    for batch in private.batches(case.data, **options):
        private.backward(case.loss(private.model, batch))
        private.step()


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", CASES)
def test_a_fast_run_of_units_releases_what_the_core_does(
    make: Callable[[torch.dtype], Case], padded: bool
) -> None:
    case = make(torch.float64)
    units = Units(IDS[: len(case.data)])
    fast = case.make()
    private = private_run(case, fast, dataset_size=len(units))
    private.use_loss(case.loss)
    run(private, case, pad_batches=padded)
    owned = [[case.data[record] for record in units.records(u)] for u in range(len(units))]
    slow = case.make()

    def loss(model: nn.Module, record: Any) -> torch.Tensor:
        return case.loss(model, shaped(default_collate([record]))).sum()

    card = train(slow, sgd(slow), loss, owned, private.plan)
    assert card.certified == private.card().certified
    assert distance(fast, slow) < 1e-9
    assert distance(fast, case.make()) > 1e-3
    assert private.referee.checks.sums == 4
    assert "forward" not in vars(fast)


def test_a_unit_moves_the_sum_by_one_clip_norm_at_most() -> None:
    """Removing a unit of seven records, all of which may be drawn."""
    case = mlp_case(torch.float64)
    sums = []
    for left_out in (None, IDS[0]):
        model = case.make()
        private = private_run(
            case, model, noise_multiplier=0.0, num_steps=1, records_per_unit=7, clip_norm=0.01
        )
        before = [p.detach().clone() for p in model.parameters()]
        units = [u for u in range(9) if IDS[private.units.records(u)[0]] != left_out]  # type: ignore[union-attr]
        private.sampler = Fixed(units)
        run(private, case)
        pairs = zip(model.parameters(), before, strict=True)
        sums.append(torch.cat([((a - b) / 0.3 * 5).detach().flatten() for a, b in pairs]))
    moved = float((sums[0] - sums[1]).norm())
    assert 0.009 < moved <= 0.01 * (1 + 1e-9)


class Fixed:
    """Draws the same units at every step."""

    dataset_size = 9

    def __init__(self, units: list[int]) -> None:
        self._units = torch.tensor(units)

    def indices(self, step: int) -> torch.Tensor:
        return self._units


def test_resuming_draws_the_same_records(tmp_path: Any) -> None:
    case = mlp_case(torch.float64)
    whole = case.make()
    run(private_run(case, whole), case)
    private = private_run(case, case.make(), ledger_path=tmp_path / "ledger")
    run(private, case, num_steps=2)
    save_checkpoint(private, tmp_path / "checkpoints")
    model = case.make()
    again = private_run(case, model, ledger_path=tmp_path / "ledger")
    load_checkpoint(again, tmp_path / "checkpoints")
    run(again, case)
    assert distance(whole, model) == 0.0


def test_the_card_speaks_of_units() -> None:
    case = mlp_case(torch.float64)
    private = private_run(case, case.make())
    run(private, case)
    text = str(private.card())
    assert "every unit joins each batch" in text
    assert "with 3 of its records at most, averaged and clipped once" in text
    assert "one unit: all of its records together; 9 of them, 40 records in all" in text
    assert "several rows of one person" not in text
    assert "an example is a unit" in text
    assert "if a unit is added or removed" in text
    assert "ε of whoever owns several units (proven)" in text
    assert "every unit but one" in text
    assert str(card_from_json(json.loads(private.card().dumps()))) == text


def named(case: Case) -> list[dict[str, Any]]:
    inputs, labels = case.data.tensors
    rows = zip(inputs, labels, IDS, strict=True)
    return [{"x": x, "y": y, "owner": f"p{owner}"} for x, y, owner in rows]


def collate(rows: list[dict[str, Any]]) -> Any:
    return tuple(torch.stack([row[key] for row in rows]) for key in ("x", "y"))


def test_a_column_says_whose_a_record_is() -> None:
    case = mlp_case(torch.float64)
    models = case.make(), case.make()
    run(private_run(case, models[0]), case)
    private = private_run(case, models[1], unit="owner")
    for x, y in private.batches(named(case), collate=collate):
        private.backward(F.cross_entropy(models[1](x), y, reduction="none"))
        private.step()
    assert distance(*models) == 0.0
    assert "one owner: all of its records" in private.card().subject["unit"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dataset_size": 40}, "the number of units, 9"),
        ({"records_per_unit": None}, "unless records_per_unit goes with it"),
        ({"unit": "row"}, "unit='row'"),
        ({"records_per_unit": 0}, "a positive integer"),
        ({"loss_reduction": "mean"}, "one loss for each record"),
        ({"sampling": "unaccounted"}, "sampling='poisson'"),
        ({"budget": "file.json"}, "runs on rows, not on units"),
        ({"method": "opacus", "shuffle": None}, "our own engine"),
        ({"unit": [*IDS[:39], None]}, "an id for every record"),
    ],
)
def test_refused(changes: dict[str, Any], word: str) -> None:
    case = mlp_case(torch.float64)
    with pytest.raises(InvalidArgumentError, match=word):
        private_run(case, case.make(), **changes)


def test_a_shared_column_is_no_name_for_a_row() -> None:
    case = mlp_case(torch.float64)
    private = private_run(case, case.make(), unit="owner", records_per_unit=None, dataset_size=40)
    with pytest.raises(InvalidArgumentError, match="several records share a owner"):
        next(private.batches(named(case), collate=collate))


def test_other_units_than_planned_are_refused() -> None:
    case = mlp_case(torch.float64)
    private = private_run(case, case.make(), unit="owner", dataset_size=11)
    with pytest.raises(InvalidArgumentError, match="9 different ids"):
        next(private.batches(named(case), collate=collate))


def test_a_backward_of_the_users_own_is_refused() -> None:
    case = mlp_case(torch.float64)
    private = private_run(case, case.make())
    for batch in private.batches(case.data):
        case.loss(private.model, batch).sum().backward()
        with pytest.raises(InvalidArgumentError, match="averages over the records of a unit"):
            private.step()
        break
    assert private.ledger.spent == 0


def moved_by_a_unit(*, as_records: bool) -> float:
    """How far leaving a unit of seven records out moves the sum, in units of the clip norm.

    `as_records` plants the bug: each of its records is clipped and counted by itself.
    """
    case = mlp_case(torch.float64)
    mine = [record for record, owner in enumerate(IDS) if owner == IDS[0]]
    alone: dict[str, Any] = {"unit": "row", "records_per_unit": None, "dataset_size": 40}
    sums = []
    for is_left_out in (False, True):
        model = case.make()
        settings: dict[str, Any] = {"noise_multiplier": 0.0, "num_steps": 1, "clip_norm": 0.01}
        private = private_run(
            case, model, **settings, **(alone if as_records else {"records_per_unit": 7})
        )
        before = [p.detach().clone() for p in model.parameters()]
        drawn = [r for r in range(40) if r not in mine or not is_left_out]
        units = [u for u in range(9) if u != 0 or not is_left_out]
        private.sampler = Fixed(drawn if as_records else units)
        run(private, case)
        pairs = zip(model.parameters(), before, strict=True)
        sums.append(torch.cat([((a - b) / 0.3 * 5).detach().flatten() for a, b in pairs]))
    return float((sums[0] - sums[1]).norm()) / 0.01


def audited(*, as_records: bool) -> tuple[float, float]:
    """The bound of an audit, and the certified ε.

    One step, everybody drawn: the sum along the unit's own direction, with noise.
    """
    noise, delta, trials = 1.0, 1e-2, 50_000
    draws = torch.randn(2, trials, generator=torch.Generator().manual_seed(0)).numpy() * noise
    scores = ScorePair(out=draws[0], present=draws[1] + moved_by_a_unit(as_records=as_records))
    bound = ClopperPearson().lower_bound(scores, delta=delta, confidence=0.95).epsilon
    claim = certified_claim(noise_multiplier=noise, sampling_prob=1.0, num_steps=1, delta=delta)
    return bound, claim.epsilon


@pytest.mark.parametrize("as_records", [False, True])
def test_an_audit_refutes_a_unit_that_was_counted_as_records(as_records: bool) -> None:
    bound, claimed = audited(as_records=as_records)
    assert (bound > claimed) == as_records
    assert bound > 0.8 * claimed
