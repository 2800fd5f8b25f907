"""A record of the Differential Privacy Deployments Registry (OpenDP and NIST): its fields, checked.

The names and the choices are those of the registry's schema of July 2026, at tier 3, where every
field is filled in. What only whoever publishes the model knows begins with `TO_FILL`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from datetime import date
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from shuffled_dpsgd.errors import InvalidArgumentError

TO_FILL = "TO BE FILLED IN BY THE CURATOR"
Product: TypeAlias = Literal[
    "Summary statistics",
    "Machine learning model",
    "Dataset",
    "Synthetic data",
    "Interactive API",
    "SQL queries",
]
Sector: TypeAlias = Literal[
    "Technology", "Healthcare", "Education", "Government", "Energy", "Finance"
]
Variant: TypeAlias = Literal[
    "Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"
]
Model: TypeAlias = Literal["Local", "Central", "Shuffle", "Federated", "Varies"]
Status: TypeAlias = Literal[
    "Converted",
    "Draft",
    "Pending",
    "Changes Required",
    "Approved",
    "Approved (Update Requested)",
    "Approved (Pending)",
]


@dataclass(frozen=True, kw_only=True)
class Basic:
    """What was published, by whom and what for."""

    name: str
    data_curators: tuple[str, ...]
    intended_use: str
    data_product_type: Product
    data_product_region: str
    description: str
    publication_date: date
    data_product_sector: Sector | None = None


@dataclass(frozen=True, kw_only=True)
class DPVariant:
    """Which definition holds, for which data, and what it leaves unprotected."""

    variant_name: Variant
    data_domain: str
    unprotected_quantities: str


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The certified (ε, δ)."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0.0):
            raise _wrong("epsilon", "a finite number above 0", self.epsilon)
        if not 0.0 < self.delta < 1.0:
            raise _wrong("delta", "a number between 0 and 1", self.delta)


@dataclass(frozen=True, kw_only=True)
class PrivacyLoss:
    """The unit of privacy and what is guaranteed to it."""

    privacy_unit: str
    privacy_unit_details: str
    privacy_parameters: Parameters
    privacy_parameters_details: str


@dataclass(frozen=True, kw_only=True)
class DeploymentModel:
    """Who is trusted with what, and how often something is published."""

    model_name: Model
    model_name_details: str
    actors: str
    release_type: Literal["One release", "Many releases"]
    release_type_details: str
    data_source_type: Literal["Static", "Dynamic"]
    data_source_type_details: str
    access_type: Literal["Interactive", "Non-interactive"]
    access_type_details: str


@dataclass(frozen=True, kw_only=True)
class AccountingOfLoss:
    """How losses add up, and what is done after the noise."""

    post_processing: str
    composition: str


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The mechanism, what came before it, and why it was chosen."""

    preprocessing_and_hyperparameter_tuning: str
    mechanisms: str
    justification: str


@dataclass(frozen=True, kw_only=True)
class Administrative:
    """Where to read on, and who wrote the record."""

    sources: str
    notes: str
    registry_authors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The parts of a record, in the registry's order."""

    basic: Basic
    dp_variant: DPVariant
    privacy_loss: PrivacyLoss
    deployment_model: DeploymentModel
    accounting: AccountingOfLoss
    implementation: Implementation
    administrative: Administrative


@dataclass(frozen=True, kw_only=True)
class Record:
    """One entry of the registry, at tier 3."""

    url_slug: str
    status: Status
    tier: Literal[3]
    deployment: Deployment

    def to_json(self) -> dict[str, Any]:
        """Plain data with the registry's names."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def check_record(data: Any) -> Record:
    """Plain data as a record; refuses a field that is missing, unknown, empty or out of range."""
    record: Record = _checked(Record, data, "")
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple):
        return list(value)
    return value.isoformat() if isinstance(value, date) else value


def _wrong(where: str, expected: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(where or "record", expected=expected, got=got)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, which is one of those that the fields above have."""
    if is_dataclass(kind):
        return _section(kind, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind) or isinstance(value, bool):
            raise _wrong(where, f"one of {', '.join(map(str, get_args(kind)))}", value)
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not value:
            raise _wrong(where, "a list with at least one entry", value)
        return tuple(_checked(str, item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is date:
        return _day(value, where)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(where, "a number", value)
        return float(value)
    if kind is str:
        if not isinstance(value, str) or not value.strip():
            raise _wrong(where, "some text", value)
        return value
    return None if value is None else _checked(get_args(kind)[0], value, where)


def _section(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(where, "a table of fields", value)
    hints = get_type_hints(kind)
    for name in value.keys() - hints.keys():
        raise _wrong(f"{where}{name}", f"one of {', '.join(hints)}", name)
    given = {}
    for field in fields(kind):
        if field.name in value:
            nested = "." if is_dataclass(hints[field.name]) else ""
            place = f"{where}{field.name}{nested}"
            given[field.name] = _checked(hints[field.name], value[field.name], place)
        elif field.default is MISSING:
            raise _wrong(f"{where}{field.name}", "a value", "nothing")
    try:
        return kind(**given)
    except InvalidArgumentError as error:
        raise error.about(f"{where}{error.argument}") from error


def _day(value: Any, where: str) -> date:
    try:
        return value if type(value) is date else date.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise _wrong(where, "a day as YYYY-MM-DD", value) from error
