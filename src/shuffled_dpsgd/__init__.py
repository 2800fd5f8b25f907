"""Differentially private training of Transformers with weight shuffling.

The names below are the whole public surface most users need; each is imported on first use, so
importing this package loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shuffled_dpsgd.accounting import (
        PrivacyClaim,
        calibrate_certified,
        calibrate_paper,
        certified_claim,
        compare,
    )
    from shuffled_dpsgd.clipping import ClippingEngine
    from shuffled_dpsgd.permutation import apply, discover, draw, verify

    __version__: str
    from shuffled_dpsgd.training import (
        PrivacyCard,
        PrivacyPlan,
        PrivateTraining,
        fix_model,
        load_checkpoint,
        make_private,
        save_checkpoint,
        train,
    )

_HOME = {
    "ClippingEngine": "clipping",
    "PrivacyCard": "training",
    "PrivacyClaim": "accounting",
    "PrivacyPlan": "training",
    "PrivateTraining": "training",
    "apply": "permutation",
    "calibrate_certified": "accounting",
    "calibrate_paper": "accounting",
    "certified_claim": "accounting",
    "compare": "accounting",
    "discover": "permutation",
    "draw": "permutation",
    "fix_model": "training",
    "load_checkpoint": "training",
    "make_private": "training",
    "save_checkpoint": "training",
    "train": "training",
    "verify": "permutation",
}

__all__ = [
    "ClippingEngine",
    "PrivacyCard",
    "PrivacyClaim",
    "PrivacyPlan",
    "PrivateTraining",
    "__version__",
    "apply",
    "calibrate_certified",
    "calibrate_paper",
    "certified_claim",
    "compare",
    "discover",
    "draw",
    "fix_model",
    "load_checkpoint",
    "make_private",
    "save_checkpoint",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # Stated once, by the tag that the package was built from.
        try:
            return metadata.version("shuffled-dpsgd")
        except metadata.PackageNotFoundError:
            return "0+source"  # run from a source tree, with PYTHONPATH=src
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
