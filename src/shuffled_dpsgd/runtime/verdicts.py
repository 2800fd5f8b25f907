"""What trials of routes have shown, remembered on disk per device and versions.

One file for each combination of device, driver, torch, Triton and this package. Only a cache:
where it cannot be read or written, routes are tried in every process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shuffled_dpsgd import __version__


@dataclass(frozen=True, kw_only=True)
class TrialVerdict:
    """Why a route does not serve; None if it does."""

    reason: str | None


def cache_folder() -> Path:
    """`$SHUFFLED_DPSGD_CACHE`, else `shuffled_dpsgd` in the user's folder for caches."""
    chosen = os.environ.get("SHUFFLED_DPSGD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shuffled_dpsgd"


class Memory:
    """The verdicts for one device under the installed versions."""

    def __init__(self, device: torch.device) -> None:
        self._facts = facts_of(device)
        name = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"routes-{name}.json"

    def find(self, route: str, package: str) -> TrialVerdict | None:
        """What is known of a route whose kernels have not changed since."""
        entry = self._entries().get(route)
        if entry is None or entry.get("source") != source_digest(package):
            return None
        return TrialVerdict(reason=entry.get("reason"))

    def keep(self, route: str, package: str, verdict: TrialVerdict) -> None:
        """Remember a verdict, beside what other processes may have written meanwhile."""
        entry = {"source": source_digest(package), **asdict(verdict)}
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        document = {"facts": self._facts, "routes": {**self._entries(), route: entry}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(document, indent=1) + "\n")
            unfinished.replace(self.path)
        except OSError:
            return  # A read-only home: the next process tries again.

    def _entries(self) -> dict[str, dict[str, str | None]]:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        routes = found.get("routes") if isinstance(found, dict) else None
        return dict(routes) if isinstance(routes, dict) else {}


def facts_of(device: torch.device) -> dict[str, object]:
    """What a verdict depends on beside the kernels themselves."""
    facts: dict[str, object] = {
        "device": device.type,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "shuffled_dpsgd": __version__,
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "capability": torch.cuda.get_device_capability(device),
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
        }
    return facts


def _driver_version() -> str | None:
    """The line in which NVIDIA's driver on Linux says what it is."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def source_digest(package: str) -> str:
    """A digest of all sources of a package, or of a single module."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folders = spec.submodule_search_locations
    paths = sorted(Path(folders[0]).rglob("*.py")) if folders else [Path(spec.origin)]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
