"""A card read back from JSON, and refused where it is not what this version would write.

What a card derives from its claim is derived again: the ε from noise, sampling probability and
steps, what it means, the verdicts. So a figure that was changed by hand is found. What only the run
knew (the names of model and data, how often something was compared) is taken as it stands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from shuffled_dpsgd.accounting.together import claim_together, runs_of
from shuffled_dpsgd.core.card import NOT_COVERED, SEVERAL_ROWS, THREAT_MODEL, USE_ASSUMPTIONS
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.referee import Checks
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.training.card import UNIT_THREAT_MODEL, AuditedBound, PrivacyCard

CARD_FILE = "privacy_card.json"
CLAIMS = ("certified", "certified_so_far", "paper")
TUPLES = ("why_not_certified", "mechanism", "not_covered")
TOLERANCE = 1e-6


def read_card(path: Path) -> PrivacyCard:
    """The card in a run's folder, or in a file that `card.dumps()` was written to.

    Raises:
        CheckpointError: there is none, or its content is not what this version would write.
    """
    file = path / CARD_FILE if path.is_dir() else path
    try:
        return card_from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(
            f"{file}: no privacy card there; pass the folder of a finished run, or a file that "
            "`private.card().dumps()` was written to"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a privacy card of this version; {error}") from error


def card_from_json(data: Mapping[str, Any]) -> PrivacyCard:
    """The inverse of `PrivacyCard.to_json`.

    Raises:
        ValueError: a key is missing or unknown, or a value is not what follows from the others.
    """
    plain = {field.name for field in fields(PrivacyCard)} & data.keys()
    given: dict[str, Any] = {name: data[name] for name in plain}
    for name in CLAIMS:
        claim = data[name]
        given[name] = None if claim is None else PrivacyClaim.from_json(claim)
    for name in TUPLES:
        given[name] = tuple(data[name])
    by_block = data["paper_by_block"].items()
    given["paper_by_block"] = {name: PrivacyClaim.from_json(claim) for name, claim in by_block}
    given["audits"] = tuple(
        AuditedBound(**{key: value for key, value in bound.items() if key != "kind"})
        for bound in data["audits"]
    )
    given["checks"] = Checks(**{**data["checks"], "reasons": set(data["checks"]["reasons"])})
    priced = given["certified"].assumptions if given["certified"] else ()
    given["use_assumptions"] = tuple(data["assumptions"][len(priced) :])
    card = PrivacyCard(**given)
    _check_words(card)
    _check_claim(card)
    where = _difference(data, card.to_json())
    if where is not None:
        raise ValueError(f"{where} is not what follows from the rest of it")
    return card


def _check_words(card: PrivacyCard) -> None:
    """The fixed words of every card are there."""
    alone, threat = ((), UNIT_THREAT_MODEL) if card.of_units else ((SEVERAL_ROWS,), THREAT_MODEL)
    for kept, words in (
        (card.not_covered, (*NOT_COVERED, *alone)),
        (card.use_assumptions, USE_ASSUMPTIONS),
        ((card.threat_model,), (threat,)),
    ):
        missing = [line for line in words if line not in kept]
        if missing:
            raise ValueError(f"it lacks the words {missing[0]!r}")


def _check_claim(card: PrivacyCard) -> None:
    """The proven ε is what its noise, sampling probability and steps give."""
    claim = card.certified
    if claim is None:
        return
    if claim.kind != "proven" or not card.private or card.why_not_certified:
        raise ValueError("it certifies an ε and says why none is certified")
    runs = runs_of(claim)
    found = claim_together(runs, claim.delta).epsilon if runs else 0.0
    if not math.isclose(found, claim.epsilon, rel_tol=TOLERANCE):
        raise ValueError(
            f"certified.epsilon is {claim.epsilon:.6g}, and its noise and steps give {found:.6g}"
        )
    if card.steps_released and not runs:
        raise ValueError("it prices no step, and steps were released")


def _difference(one: Any, other: Any, where: str = "") -> str | None:
    """The dotted name of the first place in which two JSON values differ, beyond rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            name = f"{where}.{key}" if where else str(key)
            if (key in one) != (key in other):
                return name
            found = _difference(one[key], other[key], name)
            if found is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        places = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)
        return next((place for place in places if place is not None), None)
    if isinstance(one, float) and isinstance(other, float):
        return None if math.isclose(one, other, rel_tol=TOLERANCE) else where
    return None if type(one) is type(other) and one == other else where
