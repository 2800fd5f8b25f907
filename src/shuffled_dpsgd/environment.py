"""What produced a result: versions, machine and day, written beside every number we keep.

Versions are read from metadata, so that nothing heavy is imported for the record's sake.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("shuffled-dpsgd", "torch", "numpy", "scipy", "dp-accounting", "transformers")


def environment(device: str = "cpu") -> dict[str, object]:
    """The whole record: versions by package, the machine, and the day in UTC."""
    return {**versions(PACKAGES), **machine(device), "date": today()}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions; None for a package that is not there.

    >>> versions(["no-such-package"])
    {'no-such-package': None}
    """
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine(device: str = "cpu") -> dict[str, object]:
    """Python, and the hardware behind `device`: a GPU by its name, else the processor."""
    hardware = _processor()
    if device.startswith("cuda"):
        import torch

        hardware = torch.cuda.get_device_name(device)
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "hardware": hardware,
        "cpu_cores": os.cpu_count(),
    }


def subject_of(model: str, data: str, weights: Path) -> dict[str, str]:
    """Whose card it is: names as they were given, the day, versions, and which weights.

    `weights` is the folder they were saved in; before that they are left out.
    """
    found = versions(("shuffled-dpsgd", "torch", "transformers", "dp-accounting"))
    subject = {
        "model": model,
        "data": data,
        "date": today(),
        "versions": ", ".join(f"{name} {of}" for name, of in found.items() if of is not None),
    }
    files = describe_weights(weights)
    return subject if files is None else {**subject, "weights": files}


def describe_weights(folder: Path) -> str | None:
    """The files of weights in a folder, each with its hash; None where there are none."""
    files = sorted(folder.glob("*.safetensors"))
    return ", ".join(f"{file.name} sha256 {_sha256(file)}" for file in files) or None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass  # only Linux has this file
    return platform.processor() or platform.machine()


def today() -> str:
    """The day in UTC, as ISO 8601 writes it."""
    return datetime.now(UTC).date().isoformat()
