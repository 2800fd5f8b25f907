"""What a worker compiles for a Hopper GPU is found by the process that asked, and needs no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
SECONDS = 120.0


def environment(cache: Path) -> dict[str, str]:
    kept = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "TRITON_CACHE_DIR": str(cache)}


@pytest.mark.slow
def test_kernels_are_compiled_by_workers_and_found_here(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for tally in ({"a worker": 3}, {"on disk": 3}):
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=environment(tmp_path), capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found == {"tally": tally, "here": []}


def in_group(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        state, _, group = after_name[:3]
        if int(group) == leader and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_no_worker_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(SCRIPT), "--stay"]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        assert len(in_group(leader)) == 3
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while in_group(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert in_group(leader) == []
