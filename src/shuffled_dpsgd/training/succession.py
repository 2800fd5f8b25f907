"""One private run at a time on a model, and what earlier runs have spent on it.

In a notebook a cell is run again. The run it made before would still guard the optimizer, so a new
one closes it; and the weights carry what both released, so the card of the new one adds up. What a
run spent is kept for the life of the process: by the model object, and by a digest of the rows. It
survives `close()`, and a model that was copied or saved and loaded again is a new one here.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.card import PrivacyCard

if TYPE_CHECKING:
    from shuffled_dpsgd.training.private import PrivateTraining

_SUPERSEDED = "make_private was called again on its model or its optimizer"


@dataclass(kw_only=True, eq=False)
class _Spent:
    """What one run of this process may have released so far, and of which rows."""

    plan: PrivacyPlan
    ledger: Path | None
    rows: str = ""
    releases: int = 0
    first: str = ""


_RUNS: weakref.WeakValueDictionary[int, PrivateTraining] = weakref.WeakValueDictionary()
_ON_MODEL: weakref.WeakKeyDictionary[torch.nn.Module, list[_Spent]] = weakref.WeakKeyDictionary()
_ON_ROWS: dict[str, list[_Spent]] = {}


def close_predecessors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Close any run that still holds the model or the optimizer, and say so."""
    for run in {id(r): r for r in _RUNS.values()}.values():
        if run.closed or not (run.model is model or run.optimizer is optimizer):
            continue
        run.close(because=_SUPERSEDED)
        warnings.warn(
            f"an earlier private run holds this model or optimizer: it is closed after "
            f"{run.steps_taken} steps. What it spent stays spent, and a new run on the same "
            "records adds to it; the model and optimizer are as it left them",
            UserWarning,
            stacklevel=4,
        )


def remember_run(run: PrivateTraining) -> None:
    """So that a successor can find it; nothing is kept alive."""
    _RUNS[id(run)] = run


class History:
    """What this process has released before a run, on its model and of its rows."""

    def __init__(self, run: PrivateTraining) -> None:
        self._run = weakref.ref(run)
        self._own = _Spent(plan=run.plan, ledger=run.ledger.path)
        self._on_model = _ON_MODEL.setdefault(run.model, [])
        self._before = tuple(self._on_model)
        self._beside: tuple[_Spent, ...] = ()
        self._on_model.append(self._own)

    def begin(self, rows: str) -> None:
        """The run is about to draw from `rows`; refuse noise that hid other sums before."""
        own, seed = self._own, self._own.plan.seed
        if own.rows != rows:
            known = _ON_ROWS.setdefault(rows, [])
            self._beside = tuple(each for each in known if each not in self._on_model)
            known.append(own)
            own.rows = rows
        if seed is not None and any(each.plan.seed == seed for each in self._earlier()):
            raise InvalidArgumentError(
                "seed",
                expected="another seed, or none, for a second run on this model",
                got="the seed of an earlier run on it, whose noise would be used again",
                remedy="leave the seed out; to repeat a run start from a new model, and to go on "
                "with one load its checkpoint",
            )

    def note(self) -> None:
        """A step was released."""
        run = self._run()
        assert run is not None, "a step is taken by a run"
        if not self._own.releases:
            self._own.first = run.ledger.entries()[0].token
        self._own.releases = run.ledger.spent

    def added_to(self, card: PrivacyCard) -> PrivacyCard:
        """The card with what the weights carry of earlier runs, and what else the rows gave."""
        # Whatever their rows: data in another order, or with one row more, hold the same records.
        same = self._earlier()
        beside = [each for each in self._beside if each.releases]
        if beside:
            note = (
                f"{len(beside)} earlier run{'s' if len(beside) > 1 else ''} of this process on "
                f"these rows, other models: {_summed(beside)}"
            )
            card = replace(card, not_covered=(*card.not_covered, note))
        reasons = {why for each in same for why in each.plan.uncertifiable}
        if reasons and card.certified is not None:
            why = f"an earlier run on these weights had no claim: {'; '.join(sorted(reasons))}"
            return replace(
                card,
                certified=None,
                certified_so_far=None,
                exactness=None,
                why_not_certified=(why,),
            )
        claims = [claim for each in same if (claim := each.plan.certified()) is not None]
        if not claims or card.certified is None:
            return card
        so_far = card.certified_so_far
        return replace(
            card,
            certified=_sum(card.certified, *claims),
            certified_so_far=None if so_far is None else _sum(so_far, *claims),
            exactness=None,
        )

    def _earlier(self) -> list[_Spent]:
        """Runs on the model that released something, but for those that this run goes on with."""
        run = self._run()
        assert run is not None, "asked by the run itself"
        tokens = {entry.token for entry in run.ledger.entries()}
        return [
            each
            for each in self._before
            if each.releases
            and each.first not in tokens
            and (each.ledger is None or each.ledger != self._own.ledger)
        ]


def _sum(*claims: PrivacyClaim) -> PrivacyClaim:
    """Basic composition: ε and δ of several runs add up, whatever they are."""
    shown = " + ".join(f"{claim.epsilon:.4g}" for claim in claims)
    return PrivacyClaim(
        epsilon=sum(claim.epsilon for claim in claims),
        delta=min(sum(claim.delta for claim in claims), 1.0 - 2.0**-53),
        method=f"basic composition of {len(claims)} runs on these weights ({shown}), each by "
        f"{claims[0].method}",
        kind="proven",
        assumptions=claims[0].assumptions,
        inputs={"runs": [dict(claim.inputs) for claim in claims]},
    )


def _summed(runs: list[_Spent]) -> str:
    claims = [each.plan.certified() for each in runs]
    known = [claim for claim in claims if claim is not None]
    if len(known) < len(claims):
        return "not all of them have a certified ε"
    total = _sum(*known)
    return f"ε = {total.epsilon:.4g} (proven) at δ = {total.delta:.3g} for them alone, to be added"
