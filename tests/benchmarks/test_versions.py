"""Two states of the code are compared block by block; here both are this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_four_processes_take_turns(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    subprocess.run(
        [
            sys.executable, "-m", "benchmarks.versions", "--before", str(ROOT), "--workload",
            "gpt2-small-1x8", "--rounds", "2", "--steps", "1", "--warmup", "1", "--device", "cpu",
            "--json", str(output),
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip
    (found,) = json.loads(output.read_text())["results"]
    blocks = {name: len(seconds) for name, seconds in found["block_seconds"].items()}
    assert blocks == dict.fromkeys(versions.CONTESTANTS, 2)
    assert set(found["of_before"]) == {"after", "before again", "after again"}


def test_a_folder_that_is_no_tree_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["versions", "--before", str(tmp_path), "--workload", "x"])
    with pytest.raises(SystemExit, match="2"):
        versions.parsed()
    assert "--before: expected a tree of this project" in capsys.readouterr().err
