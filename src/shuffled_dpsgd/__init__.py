"""Differentially private training of Transformers with weight shuffling.

The names below are the whole public surface most users need; each is imported on first use, so
importing this package loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping import ClippingEngine
    from shuffled_dpsgd.permutation import apply, discover, draw, verify

__version__ = "0.1.0"

_HOME = {
    "ClippingEngine": "shuffled_dpsgd.clipping",
    "apply": "shuffled_dpsgd.permutation",
    "discover": "shuffled_dpsgd.permutation",
    "draw": "shuffled_dpsgd.permutation",
    "verify": "shuffled_dpsgd.permutation",
}

__all__ = [
    "ClippingEngine",
    "__version__",
    "apply",
    "discover",
    "draw",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
