"""What produced a result: versions, machine and day, written beside every number we commit."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version

PACKAGES = ("shuffled-dpsgd", "torch", "numpy", "scipy", "dp-accounting")


def environment() -> dict[str, str]:
    """Versions are read from metadata, so that nothing heavy is imported."""
    return {
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
