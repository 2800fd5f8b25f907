"""A run whose kernels are compiled by workers ends where one does that compiles them itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.runtime import rehearsals

SCRIPT = Path(__file__).with_name("train_a_little.py")
SECONDS = 300.0


def train(caches: Path, *, device: str = "cuda", ahead: bool = True) -> dict[str, Any]:
    folders = {name: str(caches / name) for name in ("TRITON_CACHE_DIR", "SHUFFLED_DPSGD_CACHE")}
    switch = {rehearsals.SWITCH: "1" if ahead else "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), device],
        env={**os.environ, **folders, **switch},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_without_a_gpu_nothing_is_compiled(tmp_path: Path) -> None:
    found = train(tmp_path, device="cpu")
    assert (found["tally"], found["said"]) == ({}, [])


@pytest.mark.gpu
def test_workers_change_nothing_but_the_time_a_start_takes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    cold, warm = train(tmp_path / "ahead"), train(tmp_path / "ahead")
    alone = train(tmp_path / "alone", ahead=False)
    assert set(cold["tally"]) <= {"a worker", "on disk"}
    assert cold["tally"]["a worker"] > 5
    assert set(warm["tally"]) == {"on disk"}
    assert alone["tally"] == {}
    assert cold["said"] == warm["said"] == []
    assert cold["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    assert warm["norms"] == pytest.approx(alone["norms"], rel=1e-6)
