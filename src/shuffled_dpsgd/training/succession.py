"""What other runs have spent on a run's weights and rows: those of this process, and of a budget.

In a notebook a cell is run again. The run it made before would still guard the optimizer, so a new
one closes it; and the weights carry what both released, so the card of the new one prices them
together. What a run spent is kept for the life of the process: by the parameters it trained and
their storage, whatever model they are in, and by digests of rows. It survives `close()`; weights
that were copied or saved and loaded again are new ones here. A budget file (`budget.py`) keeps it
for good.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shuffled_dpsgd.accounting import PrivacyClaim, claim_together
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.distributed.agreement import first_does
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.runtime.shards import held
from shuffled_dpsgd.training.budget import BudgetFile, CountedRun, counted
from shuffled_dpsgd.training.card import PrivacyCard
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.record_digest import data_mark

if TYPE_CHECKING:
    from shuffled_dpsgd.training.private import PrivateTraining

SAME_ROWS = (
    "run {} of this program on these records: each spends privacy of its own. private.card() "
    "prices them together; budget= counts them in a file"
)
_SUPERSEDED = "make_private was called again on its model or its optimizer"


@dataclass(kw_only=True, eq=False)
class _Spent:
    """What one run of this process may have released so far, and of which rows."""

    plan: PrivacyPlan
    ledger: Path | None
    rows: frozenset[bytes] = frozenset()
    releases: int = 0
    first: str = ""
    why_not: tuple[str, ...] = ()

    @property
    def uncertifiable(self) -> tuple[str, ...]:
        """Why its plan, or what happened to it, allows no claim."""
        return (*self.plan.uncertifiable, *self.why_not)


_RUNS: weakref.WeakSet[PrivateTraining] = weakref.WeakSet()
_ON_WEIGHTS = WeakIdKeyDictionary()
_ON_ROWS: list[_Spent] = []
_NAMES = WeakIdKeyDictionary()


def close_predecessors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Close any run that still holds the model, weights of it or the optimizer, and say so."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for run in list(_RUNS):
        shared = any(id(p) in trained for p in run.model.parameters())
        if run.closed or not (shared or run.optimizer is optimizer):
            continue
        run.close(because=_SUPERSEDED)
        warnings.warn(
            f"an earlier private run holds this model or optimizer: it is closed after "
            f"{run.steps_taken} steps. What it spent stays spent, and a new run on the same "
            "records adds to it; the model and optimizer are as it left them",
            UserWarning,
            stacklevel=5,
        )


OTHER_UNITS = "of runs that draw units, no ε of several together is computed"


class History:
    """What was released before a run, on its model and of its rows, and the budget it counts in.

    `tells` says whether another run of this process on the same rows is worth a warning, and
    `in_budget` what its budget has counted, from the first release on.
    """

    def __init__(self, run: PrivateTraining, budget: str | Path | None = None) -> None:
        self.tells = budget is None
        self._run = weakref.ref(run)
        self._own = _Spent(plan=run.plan, ledger=run.ledger.path)
        weights = list(run.model.parameters())
        known = {id(each): each for key in _keys(weights) for each in _ON_WEIGHTS.get(key, ())}
        self._before = tuple(known.values())
        self._beside: tuple[_Spent, ...] = ()
        for key in _keys(p for p in weights if p.requires_grad):
            _ON_WEIGHTS.setdefault(key, []).append(self._own)
        self._budget = None if budget is None else BudgetFile(budget)
        self._data = self.in_budget = ""
        if self._budget is not None:
            first_does(run.world, lambda: self._counted().identity)
        _RUNS.add(run)

    def begin(self, data: MapStyle, rows: frozenset[bytes]) -> None:
        """The run is about to draw from `data`; refuse what may not be released of it.

        Noise that hid other sums before, and runs that do not fit into the budget.
        """
        own, seed, run = self._own, self._own.plan.seed, self._owner()
        rows |= _name_of(data)
        if not rows <= own.rows:
            own.rows |= rows
            others = [each for each in _ON_ROWS if each is not own]
            known = [each for each in others if not each.rows.isdisjoint(own.rows)]
            self._beside = tuple(each for each in known if each not in self._before)
            _ON_ROWS[:] = [*others, own]
            number = 1 + sum(each.releases > 0 for each in known)
            if self.tells and number > 1:
                say_once(SAME_ROWS.format(number))
        if seed is not None and any(each.plan.seed == seed for each in self._earlier()):
            raise InvalidArgumentError(
                "seed",
                expected="another seed, or none, for a second run on this model",
                got="the seed of an earlier run on it, whose noise would be used again",
                remedy="leave the seed out; to repeat a run start from a new model, and to go on "
                "with one load its checkpoint",
            )
        budget = self._budget
        if budget is not None:
            self._data = first_does(run.world, lambda: data_mark(data, budget.read().salt))
            first_does(run.world, lambda: self._fitted(budget))

    def _fitted(self, budget: BudgetFile) -> None:
        """Refuse before the first batch what would be refused before the first release."""
        budget.read().with_run(self._counted(), self._data, budget.path)

    def enter(self) -> None:
        """The run is about to make a release: count it in its budget, on disk, unless it is."""
        budget = self._budget
        if budget is None or self.in_budget:
            return

        def entered() -> str:
            account = budget.enter(self._counted(), self._data)
            total = account.together().describe()
            return f"{len(account.runs)} runs in {budget.path.name}, together {total}"

        self.in_budget = first_does(self._owner().world, entered)

    def note(self, why_not: tuple[str, ...]) -> None:
        """A step was released; nothing is certified for the reasons given."""
        run, self._own.why_not = self._owner(), why_not
        if not self._own.releases:
            self._own.first = run.ledger.entries()[0].token
        self._own.releases = run.ledger.spent

    def note_end(self) -> None:
        """Tell the budget how far the run got. It is counted already, so a failure only warns."""
        run = self._owner()
        if self._budget is None or not self.in_budget or not run.world.leads:
            return
        try:
            self._budget.note(self._identity(), run.ledger.spent)
        except (ShuffledDPError, OSError) as error:
            warnings.warn(f"{error}; it was not told how far this run got", stacklevel=3)

    def added_to(self, card: PrivacyCard) -> PrivacyCard:
        """The card with what the weights carry of earlier runs, and what else the rows gave."""
        # Whatever their rows: data in another order, or with one row more, hold the same records.
        same = self._earlier()
        notes = [f"the other runs on these records: {self.in_budget}"] if self.in_budget else []
        beside = [each for each in self._beside if each.releases]
        if beside and self._budget is None:
            notes.append(
                f"{len(beside)} earlier run{'s' if len(beside) > 1 else ''} of this process on "
                f"these rows, other models: {self._with_these(beside, card)}"
            )
        card = replace(card, not_covered=(*card.not_covered, *notes))
        reasons = {why for each in same for why in each.uncertifiable}
        if same and any(plan.records_per_unit for plan in (self._own.plan, *_plans(same))):
            reasons.add(OTHER_UNITS)
        if reasons and card.certified is not None:
            why = f"an earlier run on these weights had no claim: {'; '.join(sorted(reasons))}"
            return replace(
                card,
                certified=None,
                certified_so_far=None,
                exactness=None,
                why_not_certified=(why,),
            )
        if not same or card.certified is None:
            return card
        releases = self._owner().ledger.spent
        so_far = None if card.certified_so_far is None else self._together(same, releases)
        whole = self._together(same, releases and self._own.plan.num_steps)
        return replace(card, certified=whole, certified_so_far=so_far, exactness=None)

    def _together(self, others: list[_Spent], num_steps: int) -> PrivacyClaim:
        """What others cost with the first `num_steps` of this run, at its δ and adjacency."""
        plan = self._own.plan
        runs = [replace(each.plan.mechanism(), adjacency=plan.adjacency) for each in others]
        return claim_together(
            [*runs, *([plan.mechanism(num_steps)] if num_steps else [])], plan.delta
        )

    def _with_these(self, beside: list[_Spent], card: PrivacyCard) -> str:
        others = [*self._earlier(), *beside]
        if card.certified is None or any(each.uncertifiable for each in others):
            return "not all of them have a certified ε"
        if any(plan.records_per_unit for plan in (self._own.plan, *_plans(others))):
            return OTHER_UNITS
        return f"{self._together(others, self._own.plan.num_steps).describe()} with this one"

    def _earlier(self) -> list[_Spent]:
        """Runs on the model that released something, but for those that this run goes on with."""
        tokens = {entry.token for entry in self._owner().ledger.entries()}
        return [
            each
            for each in self._before
            if each.releases
            and each.first not in tokens
            and (each.ledger is None or each.ledger != self._own.ledger)
        ]

    def _owner(self) -> PrivateTraining:
        run = self._run()
        assert run is not None, "asked by the run itself"
        return run

    def _identity(self) -> str:
        """What a budget knows the run by, on rank 0: its ledger's secret, by a hash."""
        return hashlib.sha256(b"budget" + self._owner().ledger.key).hexdigest()[:32]

    def _counted(self) -> CountedRun:
        assert self._budget is not None
        run = self._owner()
        place = "" if self._own.ledger is None else f"{self._own.ledger.resolve().parent.name}: "
        return counted(
            run.plan,
            name=f"{place}{type(run.model).__name__}",
            salt=self._budget.read().salt,
            identity=self._identity(),
            releases=run.ledger.spent,
        )


def _keys(weights: Iterable[torch.Tensor]) -> Iterator[object]:
    """What weights are known by: the parameters, and their storage, which a view shares."""
    for weight in weights:
        yield from (weight, held(weight).untyped_storage())


def _name_of(data: MapStyle) -> frozenset[bytes]:
    """What a data set is known by whose rows differ from load to load."""
    try:
        return frozenset({_NAMES.setdefault(data, secrets.token_bytes(16))})
    except TypeError:  # A list cannot be remembered.
        return frozenset()


def _plans(runs: list[_Spent]) -> list[PrivacyPlan]:
    return [each.plan for each in runs]
