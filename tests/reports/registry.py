"""A record of the Differential Privacy Deployments Registry (OpenDP and NIST): its fields, checked.

The names and the choices are those of the registry's schema of July 2026, at tier 3, where every
field is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError

OPTIONAL = ("data_product_sector",)
PRODUCTS = (
    *("Summary statistics", "Machine learning model", "Dataset", "Synthetic data"),
    *("Interactive API", "SQL queries"),
)
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
STATUSES = (
    *("Converted", "Draft", "Pending", "Changes Required", "Approved"),
    *("Approved (Update Requested)", "Approved (Pending)"),
)
VARIANTS = ("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom")
DEPLOYMENT: Mapping[str, Mapping[str, Any]] = {
    "basic": {
        "name": str,
        "data_curators": list,
        "intended_use": str,
        "data_product_type": PRODUCTS,
        "data_product_region": str,
        "description": str,
        "publication_date": date,
        "data_product_sector": SECTORS,
    },
    "dp_variant": {"variant_name": VARIANTS, "data_domain": str, "unprotected_quantities": str},
    "privacy_loss": {
        "privacy_unit": str,
        "privacy_unit_details": str,
        "privacy_parameters": {"epsilon": math.inf, "delta": 1.0},
        "privacy_parameters_details": str,
    },
    "deployment_model": {
        "model_name": ("Local", "Central", "Shuffle", "Federated", "Varies"),
        "model_name_details": str,
        "actors": str,
        "release_type": ("One release", "Many releases"),
        "release_type_details": str,
        "data_source_type": ("Static", "Dynamic"),
        "data_source_type_details": str,
        "access_type": ("Interactive", "Non-interactive"),
        "access_type_details": str,
    },
    "accounting": {"post_processing": str, "composition": str},
    "implementation": {
        "preprocessing_and_hyperparameter_tuning": str,
        "mechanisms": str,
        "justification": str,
    },
    "administrative": {"sources": str, "notes": str, "registry_authors": list},
}
FIELDS: Mapping[str, Any] = {
    "url_slug": str,
    "status": STATUSES,
    "tier": (3,),
    "deployment": DEPLOYMENT,
}
"""What each field may hold: text, a list of texts, a day, one of some choices, a number between 0
and the one that stands there, or fields of its own."""


def check_record(data: Any) -> dict[str, Any]:
    """The record itself; refuses a field that is missing, unknown, empty or out of range."""
    _check(FIELDS, data, "")
    record: dict[str, Any] = data
    return record


def _check(kind: Any, value: Any, where: str) -> None:
    if isinstance(kind, Mapping):
        _check_fields(kind, value, where)
    elif isinstance(kind, tuple):
        known = value in kind and not isinstance(value, bool)
        _demand(known, where, f"one of {', '.join(map(str, kind))}", value)
    elif isinstance(kind, float):
        held = type(value) in (int, float) and 0.0 < value < kind
        _demand(held, where, f"a number above 0 and below {kind:g}", value)
    elif kind is list:
        _demand(isinstance(value, list) and value, where, "a list with at least one text", value)
        for number, item in enumerate(value):
            _check(str, item, f"{where}[{number}]")
    else:
        _demand(isinstance(value, str) and value.strip(), where, "some text", value)
        if kind is date:
            try:
                date.fromisoformat(value)
            except ValueError as error:
                message = "a day as YYYY-MM-DD"
                raise InvalidArgumentError(where, expected=message, got=value) from error


def _check_fields(kinds: Mapping[str, Any], value: Any, where: str) -> None:
    _demand(isinstance(value, Mapping), where or "record", "a table of fields", value)
    for name in {**kinds, **value}:
        place = f"{where}.{name}" if where else str(name)
        _demand(name in kinds, place, f"one of {', '.join(kinds)}", name)
        if name in value:
            _check(kinds[name], value[name], place)
        else:
            _demand(name in OPTIONAL, place, "a value", "nothing")


def _demand(holds: Any, where: str, expected: str, got: object) -> None:
    if not holds:
        raise InvalidArgumentError(where, expected=expected, got=got)
