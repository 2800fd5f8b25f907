"""The audit verbs: order and words of the output, JSON, exit status, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.auditing.checks import Check, CheckReport
from shuffled_dpsgd.cli import audit as verbs
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd_experiments.audits import step as step_module

STEP = ["--dimension", "85800000", "--sigma", "0.274", "--claim", "0.198"]
QUICK = [*STEP, "--observations", "600", "--axis-size", "256"]


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_step_prints_claims_then_bounds_then_verdicts() -> None:
    text = run("step", *QUICK).stdout
    places = [text.index(word) for word in ("(proven)", "(heuristic)", "(measured)", "refuted at")]
    assert places == sorted(places)
    assert "batch_clip 1" in text
    assert "% FPR" in text
    assert "consistent" in text
    assert "* tests the noise of Gaussian steps, not any claim" in text


@pytest.mark.slow
def test_step_json_has_seeds_counts_and_kinds(tmp_path: Path) -> None:
    output = tmp_path / "audit"
    extra = ["--sampling-prob", 0.02, "--num-steps", 500, "--output", output]
    report = json.loads(run("step", *QUICK, *extra, "--seed", 7, "--json").stdout)
    assert report["setting"]["seed"] == 7
    assert [claim["kind"] for claim in report["claims"]] == ["proven", "heuristic"]
    bound = report["attacks"][0]["bounds"]["clopper-pearson"]
    assert bound["kind"] == "measured"
    assert bound["inputs"]["num_out"] == 300
    strong = report["attacks"][5]["tpr_at_fpr"]["0.01"]
    assert strong["lower_limit"] < strong["true_positive_rate"] <= 1.0
    assert [v["outcome"] for v in report["verdicts"]] == ["consistent", "refuted at 95 %"]
    assert "they measure the sample" in report["notes"][0]
    assert "composed over 500 steps" in report["notes"][1]
    written = json.loads((output / "report.json").read_text())
    assert written["attacks"] == report["attacks"]
    assert "date" in written["environment"]
    assert {path.name for path in output.iterdir()} == {"report.json", "curves.png", "curves.svg"}


@pytest.mark.slow
def test_refuting_a_proven_claim_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims proven for ten times the noise that is really there."""
    honest = step_module.step_claims

    def overclaim(setting, *, paper_epsilon=None):
        louder = replace(setting, noise_multiplier=10 * setting.noise_multiplier)
        return honest(louder, paper_epsilon=paper_epsilon)

    monkeypatch.setattr(step_module, "step_claims", overclaim)
    result = run("step", *QUICK, code=1)
    assert "a proven claim is refuted" in result.stderr


@pytest.mark.slow
def test_black_box_is_the_same_with_the_shuffle_and_without(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    options = ["--seeds", 3, "--canaries", 20, "--training-steps", 4, "--output", tmp_path]
    found = json.loads(run("blackbox", *options, "--json").stdout)
    assert found["largest_paired_difference"] < 1e-3
    arms = found["arms"]
    assert set(arms) == {"off", "on", "on-paired", "without-privacy"}
    assert arms["off"]["loss"]["area_by_seed"] == arms["on-paired"]["loss"]["area_by_seed"]
    assert arms["off"]["loss"]["area_by_seed"] != arms["on"]["loss"]["area_by_seed"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.json",
        "black-box.png",
        "black-box.svg",
    }


def test_sensitivity_of_a_family(tmp_path: Path) -> None:
    options = ["--model", "gpt2-tiny", "--records", 3, "--strategy", "ghost"]
    found = json.loads(run("sensitivity", *options, "--output", tmp_path, "--json").stdout)
    (report,) = found["reports"]
    assert report["passed"] is True
    assert report["setting"]["strategy"] == "ghost"
    assert (tmp_path / "report.json").is_file()
    assert "holds" in run("sensitivity", *options, "--single", "--batch-clip-norm", 0.1).stdout


def test_sensitivity_that_fails_exits_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = CheckReport(
        unit="step",
        setting={},
        checks=(Check(name="one record alone", measured=1.2, allowed=1.0, detail="record 3"),),
    )
    monkeypatch.setattr(verbs, "replay_target", lambda *_, **__: [broken])
    assert "record 3" in run("sensitivity", code=1).stdout


@pytest.mark.slow
def test_run_audits_the_digits_vit(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    short = ["--epochs", 1, "--canaries", 60, "--input-canaries", 10, "--output", tmp_path]
    report = json.loads(run("run", "--epsilon", 2, *short, "--json").stdout)
    assert report["unit"] == "one whole run"
    assert report["verdicts"][0]["outcome"] == "consistent"
    assert report["card"]["audits"]
    assert report["attacks"][0]["adversary"] == "noise of every step"
    assert len(report["attacks"][0]["assumptions"]) == 3
    for trained in ("with_privacy", "without_privacy"):
        area = report["membership"][trained]
        assert area["low"] <= area["area"] <= area["high"]
        assert area["kind"] == "measured"
    assert "certified ε" in (tmp_path / "card.txt").read_text()
    paper = ["--accounting", "paper", "--epsilon", 1, "--batch-clip-norm", 1]
    text = run("run", "--mode", "step", *paper, "--epochs", 1, "--observations", 30).stdout
    assert "(proven): consistent" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--dimension", "1", "--sigma", "1"], "dimension"),
        (["step", "--dimension", "10", "--sigma", "0"], "noise_multiplier"),
        (["step", *QUICK, "--num-steps", "5"], "--sampling-prob"),
        (["step", *QUICK, "--confidence", "1"], "confidence"),
        (["run", "--mode", "both"], "--mode"),
        (["run", "--input-canary", "loud"], "input_canary"),
        (["blackbox", "--input-canary", "loud"], "input_canary"),
        (["blackbox", "--config", "nowhere.toml"], "--config"),
        (["run", "--config", "nowhere.toml"], "--config"),
        (["sensitivity", "--records", "1"], "--records"),
        (["sensitivity", "--model", "no-such-model"], "model"),
        (["sensitivity", "--strategy", "magic", "--records", "2"], "strategy"),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments: list[str], message: str) -> None:
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("verb", ["step", "composition", "run", "sensitivity"])
def test_help_has_an_example(verb: str) -> None:
    assert "Example: shuffled-dpsgd audit" in " ".join(run(verb, "--help").stdout.split())
