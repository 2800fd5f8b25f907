"""Reads a card from JSON, and refuses one that this version would not have written.

A card holds the plan of its run, without the seed. Everything that follows from the plan and the
number of steps is computed again and compared: claims and their meaning, noise, sampler,
assumptions. In a run's folder, plan and steps are also compared with the ledger. What only the run
knew (names of model and data, numbers of checks, audits) is taken as it stands.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shuffled_dpsgd.accounting.together import claim_together, runs_of
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.ledger import Ledger
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import Checks
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.training.card import AuditedBound, PrivacyCard, write_card
from shuffled_dpsgd.training.planning import plan_from_json

CARD_FILE = "privacy_card.json"
LEDGERS = ("ledger.jsonl", "privacy_ledger.jsonl")
TOLERANCE = 1e-6


def read_card(path: Path) -> PrivacyCard:
    """The card in a run's folder, or in a file that `card.dumps()` was written to.

    Raises:
        CheckpointError: there is none, or its content is not what this version would write, or
            not what the ledger of the folder says.
    """
    file = path / CARD_FILE if path.is_dir() else path
    try:
        card = card_from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(
            f"{file}: no privacy card there; pass the folder of a finished run, or a file that "
            "`private.card().dumps()` was written to"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{file}: not a privacy card of this version; {error}") from error
    for ledger in (path / name for name in LEDGERS if path.is_dir()):
        if ledger.is_file():
            _check_ledger(ledger, file, card)
    return card


def card_from_json(data: Mapping[str, Any]) -> PrivacyCard:
    """The inverse of `PrivacyCard.to_json`.

    Raises:
        ValueError: a key is missing or unknown, or a value is not what follows from the others.
    """
    plan, steps = plan_from_json(data["plan"]), data["steps_released"]
    if type(steps) is not int or not 0 <= steps <= plan.num_steps:
        raise ValueError(f"steps_released is {steps!r}, of {plan.num_steps} planned")
    card = write_card(
        plan,
        num_steps=steps,
        checks=Checks(**{**data["checks"], "reasons": set(data["checks"]["reasons"])}),
        shuffles_verified=data["shuffles_verified"],
        samples_checked=data["samples_checked"],
        shows_sums=data["exactness"] is not None,
    )
    checks = card.checks
    if not checks.sums <= checks.releases <= steps or bool(checks.not_made) != bool(checks.reasons):
        raise ValueError(f"checks: more than there can be in {steps} steps, or without reasons")
    if data["certified"] is None:
        why = tuple(data["why_not_certified"]) or card.why_not_certified
        unclaimed: dict[str, Any] = {"certified": None, "certified_so_far": None, "exactness": None}
        card = replace(card, why_not_certified=why, **unclaimed)
    elif "runs" in data["certified"]["inputs"]:
        so_far = card.certified_so_far and _together(data["certified_so_far"], plan, steps)
        whole = _together(data["certified"], plan, plan.num_steps)
        card = replace(card, exactness=None, certified=whole, certified_so_far=so_far)
    card = replace(
        card,
        shuffle=data["shuffle"] if plan.permutes else card.shuffle,
        subject=data["subject"],
        weights=data["weights"],
        audits=tuple(
            AuditedBound(**{key: value for key, value in bound.items() if key != "kind"})
            for bound in data["audits"]
        ),
        use_assumptions=(*card.use_assumptions, *data["assumptions"][len(card.assumptions) :]),
        not_covered=(*card.not_covered, *data["not_covered"][len(card.not_covered) :]),
    )
    where = _difference(data, card.to_json())
    if where is not None:
        raise ValueError(f"{where} is not what follows from the rest of it")
    return card


def _together(data: Mapping[str, Any], plan: PrivacyPlan, steps: int) -> PrivacyClaim:
    """The claim of so many steps of this run and of earlier runs on the same weights."""
    runs = runs_of(PrivacyClaim.from_json(data))
    if runs[-1] != plan.mechanism(steps):
        raise ValueError("the last of its runs is not that of its plan")
    return claim_together(runs, plan.delta)


def _check_ledger(ledger: Path, file: Path, card: PrivacyCard) -> None:
    plan = plan_from_json(card.plan)
    try:
        # A copy: opening a ledger mends its end, and a run may still write to this one.
        with TemporaryDirectory() as folder:
            for each in (ledger, ledger.with_name(f"_{ledger.name}.key")):
                shutil.copy(each, folder)
            copied = Path(folder) / ledger.name
            header = json.loads(copied.read_text(encoding="utf-8").partition("\n")[0])
            mark = plan.fingerprint()
            spent = Ledger(plan_fingerprint=mark, max_releases=plan.num_steps, path=copied).spent
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise CheckpointError(f"{ledger}: not the ledger of {file.name}; {error}") from error
    planned = header["max_releases"]
    if (card.steps_released, plan.num_steps) != (spent, planned):
        raise CheckpointError(
            f"{file}: {card.steps_released} of {plan.num_steps} steps, and {ledger.name} has "
            f"{spent} of {planned}; restore the card, or go on with the run"
        )


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
