"""A run's card for publishing: a registry record, a checklist after NIST, a hub's model card.

Only certified claims are included, no estimates and no audited bounds. Fields that the run cannot
know are marked as to be filled in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

import yaml

from shuffled_dpsgd.core.card import (
    CERTIFIED_METHOD_NOTE,
    NOT_COVERED,
    ONE_UNIT,
    USE_ASSUMPTIONS,
    CertifiedCard,
)
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd.training.card import NOT_ABOUT, REFUTED, PrivacyCard

SOFTWARE = "shuffled-dpsgd"
TO_FILL = "TO BE FILLED IN BY THE CURATOR"
SEARCH, _PUBLIC_START, METRICS, HELD_OUT, _NUMBER, _SIDE_CHANNELS = NOT_COVERED
_LOSS_ALONE, NO_OTHER_RELEASE = USE_ASSUMPTIONS
FLOATING_POINT = (
    "No measure is taken against floating-point leaks through the lowest bits of the noise, nor "
    "against timing."
)


def certified_claim_of(card: PrivacyCard) -> PrivacyClaim:
    """The proven claim of a run that released something.

    Raises:
        ShuffledDPError: there is none, or an audit refuted it, so there is nothing to publish.
    """
    claim = card.certified
    if claim is None:
        why = "; ".join(card.why_not_certified) or "the run is not private"
    elif not card.steps_released:
        why = "no step was released"
    elif not math.isfinite(claim.epsilon):
        why = "its ε is infinite"
    elif card.verdicts.get("certified") == REFUTED:
        why = "an audit refuted its certified ε"
    elif NOT_ABOUT in card.subject:
        why = f"it is not about {card.subject[NOT_ABOUT]}"
    else:
        _require_filled(card.subject, "subject")
        return claim
    raise ShuffledDPError(f"this run has no certified ε to publish: {why}")


def registry_yaml(card: PrivacyCard) -> str:
    """The draft of a tier-3 record of the registry; fields of the curator begin with `TO_FILL`."""
    claim = certified_claim_of(card)
    subject = card.subject
    model, data = (subject.get(name, TO_FILL) for name in ("model", "data"))
    day = subject.get("date", date.today().isoformat())
    try:
        date.fromisoformat(day)
    except ValueError as error:
        raise InvalidArgumentError("date", expected="a day as YYYY-MM-DD", got=day) from error
    slug = "-".join([subject.get("model", "model"), subject.get("data", "data"), day])
    unit = "unit" if card.of_units else "record"
    return to_yaml(
        {
            "url_slug": re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-"),
            "status": "Draft",
            "tier": 3,
            "deployment": {
                "basic": {
                    "name": f"{model}, trained on {data}",
                    "data_curators": [f"{TO_FILL}: who publishes the model"],
                    "intended_use": f"{TO_FILL}: what the model is for",
                    "data_product_type": "Machine learning model",
                    "data_product_region": f"{TO_FILL}: whose data, under which law",
                    "description": f"The weights of {model}, trained on {data} by DP-SGD in "
                    f"{card.steps_released} steps.",
                    "publication_date": day,
                },
                "dp_variant": {
                    "variant_name": "Approximate DP",
                    "data_domain": f"Every finite collection of {unit}s. "
                    f"{TO_FILL}: what a {unit} is",
                    "unprotected_quantities": _listed(card.not_covered),
                },
                "privacy_loss": _privacy_loss(card, claim),
                "deployment_model": _deployment_model(card),
                "accounting": {
                    "post_processing": f"Shuffle of the weights: {card.shuffle}; credited with "
                    f"nothing. {TO_FILL}: merging, quantization or other work on the weights",
                    "composition": f"By {claim.method}: {'; '.join(claim.assumptions)}. All steps "
                    "of the plan are composed.",
                },
                "implementation": _implementation(card),
                "administrative": {
                    "sources": f"{TO_FILL}: links to the model and its documentation",
                    "notes": f"Drafted by {SOFTWARE} from the privacy card of the run. "
                    "publication_date is the day of that run.",
                    "registry_authors": [f"{TO_FILL}: who filled in this record"],
                },
            },
        }
    )


def _privacy_loss(card: PrivacyCard, claim: PrivacyClaim) -> dict[str, Any]:
    meaning = () if card.meaning is None else card.meaning.describe()
    several = "be several units" if card.of_units else "own several rows"
    return {
        "privacy_unit": _unit(card),
        "privacy_unit_details": f"Adjacent data sets: {_adjacency(card)}. {TO_FILL}: whether one "
        f"person can {several}",
        "privacy_parameters": {"epsilon": claim.epsilon, "delta": claim.delta},
        "privacy_parameters_details": _listed(
            (f"{claim.describe()}, {CERTIFIED_METHOD_NOTE}", *meaning, *card.assumptions)
        ),
    }


def _deployment_model(card: PrivacyCard) -> dict[str, Any]:
    return {
        "model_name": "Central",
        "model_name_details": "Whoever trains sees all records; whoever gets the weights does not.",
        "actors": f"Threat model: {card.threat_model}. {TO_FILL}: who has access to what",
        "release_type": "One release",
        "release_type_details": f"One set of weights. {TO_FILL}: other and later releases from the "
        "same data",
        "data_source_type": "Static",
        "data_source_type_details": "The records were fixed before the first step.",
        "access_type": "Non-interactive",
        "access_type_details": "Questions to the released weights spend nothing.",
    }


def _implementation(card: PrivacyCard) -> dict[str, Any]:
    versions = card.subject.get("versions", f"{TO_FILL}: versions of the software")
    lines = (card.sampler, *card.mechanism, *card.check_lines, f"randomness: {card.randomness}")
    chosen = card.subject.get("chosen by method", "none")
    return {
        "preprocessing_and_hyperparameter_tuning": "Not accounted for by this record. "
        f"Settings that the method chose without the data: {chosen}. {TO_FILL}: pre-processing, "
        "and what was tried before",
        "mechanisms": f"{_listed(lines)}\n\n{FLOATING_POINT} Software: {versions}. {TO_FILL}: "
        "how the data and the seed are kept",
        "justification": f"{TO_FILL}: why this ε, this unit and this trust model",
    }


def nist_checklist(card: PrivacyCard) -> str:
    """One page along the pyramid of NIST SP 800-226: what the run answers, what is left to do."""
    claim = certified_claim_of(card)
    whole_delta = claim.delta * card.plan["dataset_size"] < 1.0
    untried = [line for line in card.use_assumptions if line not in (*USE_ASSUMPTIONS, ONE_UNIT)]
    compared = bool(card.checks.sums) and not card.checks.not_made and not untried
    watched = "; ".join((*card.check_lines, *untried)) or "nothing was"
    one = "unit" if card.of_units else "record"
    rows: dict[str, list[tuple[bool, str, str]]] = {
        "Top: the guarantee": [
            (True, "privacy parameters", f"{claim.describe()}, {CERTIFIED_METHOD_NOTE}"),
            (whole_delta, f"δ below one over the number of {one}s", f"δ = {claim.delta:.3g}"),
            (True, "neighbouring data sets", _adjacency(card)),
            (False, "unit of privacy is a person", f"the unit is {_unit(card)}"),
            (False, "other releases of the same data", NO_OTHER_RELEASE),
        ],
        "Middle: algorithms, correctness, side channels": [
            (True, "mechanism", "; ".join((card.sampler, *card.mechanism))),
            (compared, "correctness watched", watched),
            (card.plan["secure"], "randomness", card.randomness),
            (False, "side channels and floating point", FLOATING_POINT),
            (False, "settings chosen without the data", SEARCH),
            (False, "utility and bias", "score groups of people one by one, before publishing"),
        ],
        "Bottom: deployment": [
            (True, "query model", "not interactive: the weights are published once"),
            (False, "threat and trust model", f"central; {card.threat_model}"),
            (False, "what else must not be published", f"{METRICS}; {HELD_OUT}"),
            (False, "data security and access control", "who could read the records"),
            (False, "data collection", "how the records were collected and how long they stay"),
        ],
    }
    parts = [
        f"\n## {name}\n\n" + "".join(f"- [{' x'[done]}] **{q}**: {a}\n" for done, q, a in of)
        for name, of in rows.items()
    ]
    return (
        f"# Checklist after NIST SP 800-226: {_title(card)}\n\n`[x]` the run answers it, from its "
        f"privacy card; `[ ]` for whoever publishes the model.\n{''.join(parts)}"
    )


def model_card(card: PrivacyCard) -> str:
    """A hub's model card: tags, a privacy block for machines, and the certified card for people."""
    certified_claim_of(card)
    front = {
        "tags": ["differential-privacy", "dp-sgd"],
        "differential_privacy": privacy_block(card),
    }
    if "transformers" in card.subject.get("versions", ""):
        front = {"library_name": "transformers", **front}
    facts = [section for section in CertifiedCard.sections(card) if section[0] != "target"]
    rows = [*((name, [of]) for name, of in card.subject.items()), *facts]
    text = "".join(f"- **{name}**: {'; '.join(lines)}\n" for name, lines in rows)
    return (
        f"---\n{to_yaml(front)}---\n\n# {_title(card)}\n\n{TO_FILL}: what the model is for, how "
        f"well it does, and for whom it does worse.\n\n## Privacy\n\nTrained with differential "
        f"privacy by `{SOFTWARE}`. The ε below is proven under the assumptions listed.\n\n{text}"
    )


def privacy_block(card: PrivacyCard) -> dict[str, Any]:
    """The certified claim for machines, flat, with the kind beside its ε."""
    claim = certified_claim_of(card)
    return {
        "kind": claim.kind,
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "unit": _unit(card),
        "accountant": claim.method,
        **claim.inputs,
        "software": card.subject.get("versions", SOFTWARE),
        "weights": card.subject.get("weights", f"{TO_FILL}: a hash of the weights"),
    }


class _Readable(yaml.SafeDumper):
    """Paragraphs as blocks of lines."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def to_yaml(value: Any) -> str:
    """Plain data as YAML, in its own order; refuses a field with nothing in it."""
    _require_filled(value, "")
    text: str = yaml.dump(value, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=100)
    return text


def _require_filled(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _require_filled(inner, f"{where}.{name}" if where else name)
    elif value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise InvalidArgumentError(where, expected="something filled in", got=value)


def _title(card: PrivacyCard) -> str:
    return f"{card.subject.get('model', 'model')} on {card.subject.get('data', 'private data')}"


def _unit(card: PrivacyCard) -> str:
    return card.subject.get("unit", "one unit" if card.of_units else "one row")


def _adjacency(card: PrivacyCard) -> str:
    one = "one unit, with all of its records," if card.of_units else "one row"
    how = {"add-remove": "added or removed", "replace-one": "replaced"}[card.plan["adjacency"]]
    return f"{one} is {how}"


def _listed(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
