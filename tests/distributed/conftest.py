"""One process that starts the ranks of every test here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.launching import Launcher


@pytest.fixture(scope="package")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()
