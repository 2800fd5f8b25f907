"""The example runs and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shuffle_a_model.py"


@pytest.mark.slow
def test_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), "--scope", "full"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "100.0%" in done.stdout
    gap = re.search(r"never shuffled: (\S+)", done.stdout)
    assert gap is not None
    assert float(gap.group(1)) < 1e-4
    losses = re.search(r"steps: (\S+) shuffled, (\S+) not", done.stdout)
    assert losses is not None
    assert float(losses.group(1)) == pytest.approx(float(losses.group(2)), rel=1e-4)
