"""The example runs and finds its own agreement with the oracle."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "clip_per_sample.py"


def test_example_agrees_with_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    difference = float(printed.strip().splitlines()[-1].split(": ")[1])
    assert difference < 1e-4
    assert "broadcast" in printed
