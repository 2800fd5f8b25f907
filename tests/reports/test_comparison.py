"""Runs beside each other: one page, one inlined script, nothing from outside, nothing unescaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reports.browser import BROWSER, WIDTHS, measure
from reports.conftest import made_up_record
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.reports import MetricsLog
from shuffled_dpsgd.reports.comparison import comparison_page, differing, read_runs
from shuffled_dpsgd.training import PrivacyOptions, make_plan, write_card


def folder(path: Path, epsilon: float, *, finished: bool = True) -> Path:
    """What a finished run leaves, as far as the page reads it."""
    path.mkdir()
    options = PrivacyOptions(
        dataset_size=100, expected_batch_size=10, num_steps=9, delta=1e-5, epsilon=epsilon
    )
    card = write_card(make_plan(options, sizes={"w": 4}, moved=frozenset("w")), num_steps=9)
    (path / "privacy_card.json").write_text(card.dumps())
    config = {"task": "digits", "privacy": {"epsilon": epsilon}}
    summary = {"finished": finished, "config": config, "score_name": "accuracy"}
    (path / "summary.json").write_text(json.dumps({**summary, "heldout_score": epsilon / 10}))
    for step in range(1, 10):
        MetricsLog(path / "metrics.jsonl").append(made_up_record(step))
    return path


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [folder(tmp_path / "<script><b>", 1.0), folder(tmp_path / "two", 3.0)]


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    twins = [folder(tmp_path / place / "run", 1.0) for place in ("a", "b")]
    assert [run.name for run in read_runs(twins)] == [str(twin) for twin in twins]
    assert read_runs([twins[0], folder(tmp_path / "c", 1.0)])[0].name == "run"


def test_the_page_has_results_claims_and_settings(folders: list[Path]) -> None:
    runs = read_runs(folders)
    page = comparison_page(runs)
    assert differing(runs) == [("privacy.epsilon", ["1.0", "3.0"])]
    for run in runs:
        assert run.card.certified is not None
        assert run.card.certified.describe() in page
    assert "accuracy 0.1000" in page
    assert "accuracy 0.3000" in page
    assert page.index("Results") < page.index("Settings that differ") < page.index("Curves")
    assert "No ε covers publishing them" in page
    data = re.findall(r'id="runs">(.*?)</script>', page, re.DOTALL)
    (first, second) = json.loads(data[0])
    assert first["name"] == "<script><b>"
    steps, scores = zip(*second["curves"]["heldout_score"], strict=True)
    assert (steps, scores) == ((3, 6, 9), pytest.approx((0.3, 0.6, 0.9)))
    assert page.count("<script") == page.count("</script>") == 2
    assert re.findall(r'(?:src|href)="', page) == []
    assert "<b>" not in page


def test_what_is_no_finished_run_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="two folders"):
        read_runs(folders[:1])
    with pytest.raises(CheckpointError, match="not the folder of a finished run"):
        read_runs([folders[0], tmp_path])
    with pytest.raises(CheckpointError, match="not finished"):
        read_runs([folders[0], folder(tmp_path / "three", 2.0, finished=False)])
    broken = json.loads((folders[1] / "privacy_card.json").read_text())
    broken["certified"]["epsilon"] = 0.1
    (folders[1] / "privacy_card.json").write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match="not a privacy card"):
        read_runs(folders)


def test_the_verb_writes_the_page(folders: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "runs.html"
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--output", str(page)])
    assert (done.exit_code, "2 runs; settings that differ: 1" in done.output) == (0, True)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", WIDTHS)
def test_curves_are_drawn_and_fit(folders: list[Path], tmp_path: Path, width: int) -> None:
    runs = [replace(run, name=name) for run, name in zip(read_runs(folders), "ab", strict=True)]
    # The last values stand there; a tap shows those of all runs at the step under the finger.
    script = """<script>
      const curve = document.querySelector("svg"), box = curve.getBoundingClientRect();
      const read = document.querySelector(".read"), first = read.textContent;
      curve.dispatchEvent(new PointerEvent("pointerdown", {clientX: box.left + box.width / 3}));
      const drawn = document.querySelectorAll("polyline").length === 8;
      const right = drawn && first === "a: 0.9000 at step 9 · b: 0.9000 at step 9"
        && read.textContent === "a: 0.3000 at step 3 · b: 0.3000 at step 3";
      document.body.style.backgroundColor = right ? "rgb(1, 2, 3)" : "red";
    </script></body>"""
    page = comparison_page(runs).replace("</body>", script)
    shown = measure(page, tmp_path, width=width, scheme="light")
    assert shown.background == "rgb(1, 2, 3)"
    assert shown.width == width
    # A table that is too wide scrolls by itself.
    assert set(shown.sticking_out) <= {"TABLE", "TBODY", "TR", "TH", "TD"}
