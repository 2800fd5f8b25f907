"""The record of the environment: everything a number depends on, and nothing heavy imported."""

from __future__ import annotations

import subprocess
import sys
from datetime import date

import torch

from shuffled_dpsgd import __version__
from shuffled_dpsgd.environment import PACKAGES, environment


def test_versions_machine_and_day_are_recorded() -> None:
    found = environment()
    assert set(PACKAGES) <= found.keys()
    assert found["shuffled-dpsgd"] == __version__
    # The build's name, as in 2.15.0+cu132, is not always part of the package's version.
    assert str(found["torch"]).partition("+")[0] == str(torch.__version__).partition("+")[0]
    assert found["hardware"]
    assert date.fromisoformat(str(found["date"]))


def test_the_record_imports_nothing_heavy() -> None:
    code = (
        "import sys; from shuffled_dpsgd.environment import environment; environment(); "
        "print([m for m in ('torch', 'numpy', 'scipy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
