"""The train verb: output for people and machines, folders, resumption, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.test_bad_input import settings, toml
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.cli.run_start import stated_run, with_overrides

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

SHORT = ["--epochs", "1", "--batch-size", "480"]
NUM_SHORT_STEPS = 3


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_digits_prints_certified_claim_and_writes_a_folder(tmp_path: Path) -> None:
    printed = run("digits", *SHORT, "--output", tmp_path / "out").stdout
    assert "calibrated to the certified ε, which is proven" in " ".join(printed.split())
    assert "(proven)" in printed
    assert "(heuristic)" in printed
    assert "s for checks" in printed
    card = (tmp_path / "out" / "privacy_card.txt").read_text(encoding="utf-8")
    assert "not checked" not in card
    steps = [line for line in printed.splitlines() if line.startswith("step ")]
    assert steps
    assert all("spent so far, of a plan of ε = " in line for line in steps)
    assert not any("proven" in line for line in steps)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "held-out rows are training records" not in page


def test_a_file_without_privacy_is_planned_and_its_budget_may_come_from_a_flag(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    raw = settings("digits", privacy__noise_multiplier=None, privacy__clip_norm=None)
    raw["privacy"]["method"] = "non-private"
    file.write_text(toml(raw))
    assert "no noise" in run("--config", file, "--dry-run").stdout
    found = json.loads(run("--config", file, "--dry-run", "--json").stdout)
    assert found["run"]["certified"] is None
    assert found["suggested"]["learning_rate"] is None
    file.write_text(toml(settings("digits", privacy__noise_multiplier=None)))
    flags = {"privacy": dict.fromkeys(("method", "epsilon")), "training": {"epochs": None}}
    flags["privacy"]["epsilon"] = 3.0
    chosen = with_overrides(stated_run(None, file), flags, seed=None, secure=False)
    assert chosen.privacy.epsilon == 3.0


def test_people_see_every_split_and_what_texts_scored() -> None:
    from shuffled_dpsgd.cli.training_display import scored

    one: dict[str, Any] = {"score_name": "accuracy", "heldout_score": 0.5}
    one["heldout_scores"] = {"matched": {"score": 0.5}, "mismatched": {"score": 0.25}}
    assert [*scored(one)] == [
        ("held-out accuracy", "0.5000 on matched"),
        ("held-out accuracy", "0.2500 on mismatched"),
    ]
    one["heldout_scores"] = {"dev": {"score": 0.5}}
    texts = {"split": "dev", "num_prompts": 7, "bleu": 12.345678, "variants": {"bleu": "BLEU"}}
    assert [*scored(one | {"generation": texts})] == [
        ("held-out accuracy", "0.5000"),
        ("generated texts", "7 on dev: bleu 12.35"),
    ]
    assert [*scored(one | {"heldout_scores": {}, "heldout_score": None})] == []
    lost = {"heldout_scores": {"dev": {"score": None}}, "heldout_score": None}
    assert [*scored(one | lost)] == [("held-out accuracy", "not finite")]


@pytest.mark.slow
def test_json_is_one_object(tmp_path: Path) -> None:
    result = run("digits", *SHORT, "--epsilon", 4, "--output", tmp_path / "out", "--json")
    summary = json.loads(result.stdout)
    assert summary["finished"] is True
    assert summary["steps_taken"] == NUM_SHORT_STEPS
    assert summary["output"] == str(tmp_path / "out")
    certified = summary["privacy_card"]["certified"]
    assert certified["kind"] == "proven"
    assert 3.9 < certified["epsilon"] <= 4.0


@pytest.mark.slow
def test_paper_accounting_shows_certified_epsilon_beside_the_heuristic(tmp_path: Path) -> None:
    result = run("digits", *SHORT, "--accounting", "paper", "--output", tmp_path / "out", "--json")
    card = json.loads(result.stdout)["privacy_card"]
    assert card["paper"]["kind"] == "heuristic"
    assert card["paper"]["epsilon"] <= 3.0 * (1 + 1e-6)
    assert card["paper"]["inputs"]["batch_clip"] == 1.0
    assert card["certified"]["kind"] == "proven"
    assert card["certified"]["epsilon"] > card["paper"]["epsilon"]
    assert "not a guarantee" in (tmp_path / "out" / "privacy_card.txt").read_text()


@pytest.mark.slow
def test_a_config_file_is_run(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        """
        task = "digits"
        [model]
        name = "vit-digits"
        [data]
        format = "digits"
        [privacy]
        noise_multiplier = 1.0
        delta = 1e-4
        clip_norm = 1.0
        shuffle = "at-release"
        scope = "full"
        [optimizer]
        name = "sgd"
        learning_rate = 0.1
        [training]
        expected_batch_size = 64
        num_steps = 2
        """
    )
    result = run("--config", config, "--output", tmp_path / "out", "--json")
    summary = json.loads(result.stdout)
    assert summary["config"]["privacy"]["scope"] == "full"
    assert summary["privacy_card"]["shuffle"].startswith("at-release")
    assert "keyed by the operating system" in summary["privacy_card"]["randomness"]


@pytest.mark.slow
def test_interrupt_tells_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shuffled_dpsgd.cli import training_display

    plain_update = training_display.TrainingBar.update

    def interrupt(self: Any, record: Any, progress: Any) -> None:
        plain_update(self, record, progress)
        if record.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(training_display.TrainingBar, "update", interrupt)
        stopped = run("digits", *SHORT, "--output", tmp_path / "out", code=130).stdout
    assert "SIGINT" in stopped
    assert "--resume" in stopped
    summary = json.loads(run("--resume", tmp_path / "out", "--json").stdout)
    assert summary["finished"] is True
    assert summary["steps_taken"] == NUM_SHORT_STEPS

    again = run("--resume", tmp_path / "out").stdout
    assert "nothing is left to train" in again
    assert json.loads(run("--resume", tmp_path / "out", "--json").stdout)["already_finished"]


@pytest.mark.slow
def test_steps_lost_in_a_crash_are_named_and_the_last_weights_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shuffled_dpsgd.cli import training_display

    def die(*_: Any) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(training_display.TrainingBar, "update", die)
        run("digits", *SHORT, "--secure", "--output", tmp_path / "out", code=9)
    first = sorted((tmp_path / "out" / "checkpoints").iterdir())[0].name
    done = run("--resume", tmp_path / "out", "--checkpoint", first).stdout
    assert f"step {NUM_SHORT_STEPS} of the plan" in " ".join(done.split())
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps_taken"], summary["steps_lost"]) == (NUM_SHORT_STEPS - 1, 1)
    assert summary["heldout_score"] is not None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cifar"], "expected digits"),
        ([], "expected digits"),
        (["digits", "--config", "x.toml"], "nothing beside --config"),
        (["--config", "absent.toml"], "a TOML file"),
        (["digits", "--accounting", "gdp"], "privacy.accounting"),
        (["digits", "--shuffle", "never"], "privacy.shuffle"),
        (["digits", "--seed", "1", "--secure"], "nothing beside --secure"),
        (["--resume", "absent"], "no run.json"),
        (["--resume", "absent", "--epsilon", "2"], "privacy.epsilon"),
        (["digits", "--epsilon", "-1", "--output", "out"], "epsilon"),
    ],
)
def test_bad_input_is_one_line_and_exit_two(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, code=2)
    assert expected in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert result.output.startswith("error: ")


@pytest.mark.slow
def test_a_tracker_sees_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "my_tracker.py").write_text(
        "seen = []\ndef follow(metrics):\n    seen.append(metrics['step'])\n"
    )
    run("digits", *SHORT, "--output", "out", "--json", "--tracker", "my_tracker:follow")
    assert sys.modules.pop("my_tracker").seen == [1, 2, 3]
    for wrong in ("absent:follow", "json:absent", "json", "sys:path"):
        assert "--tracker" in run("digits", "--tracker", wrong, code=2).stderr


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    assert "--resume" in run("digits", "--output", tmp_path, code=2).output


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert "shuffled-dpsgd train digits" in result.stdout
    assert "--resume" in result.stdout
