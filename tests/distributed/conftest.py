"""One process that starts the ranks of every test here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distributed.equality import NAMES
from distributed.launching import Launcher


@pytest.fixture(scope="package")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="package")
def alone(launcher: Launcher) -> dict[str, Any]:
    """What one process finds that has the whole model."""
    found: dict[str, Any] = launcher.run("distributed.replicas", "several", ranks=1, names=NAMES)[0]
    return found
