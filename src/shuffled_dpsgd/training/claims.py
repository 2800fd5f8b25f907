"""What may be claimed of a run: its card, and the events after which nothing can be certified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.card import NOT_ABOUT, PrivacyCard, write_card
from shuffled_dpsgd.training.released_weights import describe_weights, digests, watch_saves
from shuffled_dpsgd.training.rows import describe_unit

if TYPE_CHECKING:
    from shuffled_dpsgd.training.private import PrivateTraining

# The parts of a run that its claims rest on.
PARTS = ("plan", "engine", "sampler", "mechanism", "ledger", "streams", "referee")
SEEDED_TWICE = (
    "steps were released more than once with different sums: a seeded run draws the same batch "
    "again, and the accountant prices independent draws only"
)
CHANGED = "the weights that the model has now: they are others than release() left"
NO_LEDGER = (
    "a seeded run was resumed without its ledger on disk, so nobody knows which noise was used "
    "before on other sums"
)


class Claims:
    """Writes the card of `run`, and remembers which of its parts were replaced.

    `trainable` are the weights that the run trains. Once they are released, their digests say
    whether the model still has them.
    """

    def __init__(self, run: PrivateTraining, trainable: Mapping[str, torch.Tensor]) -> None:
        self._run = run
        self._trainable = trainable
        self._parts = {name: getattr(run, name) for name in PARTS}
        self._replaced, self._audited = set[str](), set[str]()
        self._released_as: dict[str, list[str]] | None = None
        self._trained_as: set[str] | None = None
        watch_saves(run.model, None)

    def card(self) -> PrivacyCard:
        """The privacy card: what may be claimed about everything released so far."""
        run, parts = self._run, ", ".join(sorted(self._audited))
        audited = [f"not checked: an audit took the place of the run's {parts}"] if parts else []
        card = write_card(
            run.plan,
            num_steps=run.ledger.spent,
            spec=run.spec,
            released=run.released,
            shuffles_verified=run.shuffling.num_verified,
            samples_checked=run.engine.num_checked_by_coin,
            checks=run.referee.checks,
            why_not=self.why_not_certified(),
            not_checked=(*run.neighbours.not_checked, *audited),
            shows_sums=run.shows_sums,
        )
        # A rank of a sharded run has its own rows only, so it has no digest of the whole.
        card = replace(card, weights={} if run.is_sharded else self._released_as or {})
        subject = {"unit": describe_unit(run.plan, run.unit, run.rows, run.units)}
        subject |= {NOT_ABOUT: CHANGED} if self._trained_as != self._trained_now() else {}
        return run.history.added_to(card).about(**subject)

    def why_not_certified(self) -> tuple[str, ...]:
        """Events of this run after which no ε can be certified."""
        run = self._run
        self._replaced |= {n for n, part in self._parts.items() if getattr(run, n) is not part}
        gone = ", ".join(sorted(self._replaced))
        reasons = [f"another object took the place of the run's {gone}"] if gone else []
        if not run.plan.secure:
            reasons += [SEEDED_TWICE] if run.ledger.repeated_steps else []
            reasons += [NO_LEDGER] if run.resumed_without_ledger else []
        return tuple(reasons)

    def audit_with(self, **parts: Any) -> None:
        """Replace parts by an audit's own objects: the plan's claims stay, and the card says so.

        Whoever replaces a part in any other way loses every claim.
        """
        for name, part in parts.items():
            setattr(self._run, name, part)
        self._parts |= parts
        self._audited |= set(parts)

    def note_released(self) -> None:
        """Record digests of the released weights, for the card and for whoever saves others."""
        run = self._run
        self._released_as = known = describe_weights(run.model) if run.released else None
        self._trained_as = self._trained_now()
        watch_saves(run.model, None if known is None or run.is_sharded else known["trained"])

    def check_released(self) -> None:
        """Refuse weights that were changed after `release()`."""
        if self._released_as not in (None, describe_weights(self._run.model)):
            raise InvalidArgumentError(
                "model",
                expected="the weights as release() left them, which the privacy card is about",
                got="weights that were changed since",
                remedy="save before you train on or change them; what is made of released weights "
                "without the private records may be saved by itself, as model.save_pretrained does",
            )

    def _trained_now(self) -> set[str] | None:
        return digests(self._trainable.values()) if self._run.released else None
