"""What leaves this room: an ε that says how it was obtained and how far it can be trusted.

A bare number is taken for a guarantee. So a `PrivacyClaim` says `proven` (by a theorem),
`heuristic` (an estimate nobody has proved) or `measured` (an empirical bound from an attack).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from shuffled_dpsgd.errors import require

Kind = Literal["proven", "heuristic", "measured"]
Adjacency = Literal["add-remove", "replace-one"]


@dataclass(frozen=True, kw_only=True)
class PrivacyClaim:
    """An (ε, δ) statement with its method, its kind, and everything it rests on.

    `inputs` are what the number was computed from. An infinite `epsilon` claims nothing.

    >>> claim = PrivacyClaim(epsilon=1.0, delta=1e-5, method="PLD", kind="proven")
    >>> claim.describe()
    'ε = 1 (proven) at δ = 1e-05 by PLD'
    """

    epsilon: float
    delta: float
    method: str
    kind: Kind
    assumptions: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.kind in get_args(Kind), "kind", f"one of {get_args(Kind)}", self.kind)
        require(self.epsilon >= 0.0, "epsilon", "a number >= 0", self.epsilon)
        require(0.0 <= self.delta < 1.0, "delta", "a number in [0, 1)", self.delta)
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle through the constructor: a read-only mapping cannot be pickled itself."""
        return (PrivacyClaim.from_json, (self.to_json(),))

    def describe(self) -> str:
        """One line that always contains the kind."""
        found = f"{self:.4g}" if math.isinf(self.epsilon) else f"ε = {self:.4g}"
        return f"{found} at δ = {self.delta:.3g} by {self.method}"

    __str__ = describe

    def __format__(self, spec: str) -> str:
        """The number as `spec` asks for it, never without its kind."""
        number = f"{self.epsilon:{spec}} ({self.kind})" if spec else self.describe()
        return f"no ε is {self.kind}" if spec and math.isinf(self.epsilon) else number

    def to_json(self) -> dict[str, Any]:
        """Plain data; the kind travels with the number."""
        known = {item.name: getattr(self, item.name) for item in fields(self)}
        return known | {"assumptions": list(self.assumptions), "inputs": dict(self.inputs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrivacyClaim:
        """The inverse of `to_json`; a null epsilon reads as infinite, as JSON has no infinity."""
        epsilon = math.inf if data["epsilon"] is None else float(data["epsilon"])
        return cls(**{**data, "epsilon": epsilon})
