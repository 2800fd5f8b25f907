"""`budget`, and `--budget` on the commands that train: one file, one total."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.test_bad_input import settings, toml
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.training.budget import BudgetFile, CountedRun

SHORT = ["--epochs", "1", "--batch-size", "400", "--json"]


def invoke(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == code, done.output
    return done.output


def shown(file: Path) -> dict[str, Any]:
    return json.loads(invoke("budget", "show", file, "--json"))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    invoke("budget", "new", "b.json", "--epsilon", 4.5, "--delta", 1e-4)
    return tmp_path / "b.json"


def test_a_user_s_two_runs_and_a_third_that_is_one_too_many(file: Path, tmp_path: Path) -> None:
    assert "Nothing is spent yet; limit ε = 4.5" in invoke("budget", "show", "b.json")
    for number in (1, 2):
        invoke("train", "digits", "--budget", "b.json", "--output", f"run{number}", *SHORT)
    found = shown(file)
    assert [run["epsilon"] for run in found["runs"]] == [pytest.approx(3.0, abs=2e-3)] * 2
    assert [run["ending"] for run in found["runs"]] == ["finished"] * 2
    assert [run["name"].split(":")[0] for run in found["runs"]] == ["run1", "run2"]
    together = found["together"]
    assert together["kind"] == "proven"
    assert 3.0 < together["epsilon"] < 4.5
    assert found["left"] == pytest.approx(4.5 - together["epsilon"])
    assert found["with_another_like_the_last"] > together["epsilon"]
    printed = " ".join(invoke("budget", "show", "b.json").split())
    assert "if neither their number nor their settings were chosen by" in printed
    card = json.loads((tmp_path / "run2" / "privacy_card.json").read_text())
    assert any("2 runs in b.json, together ε" in line for line in card["not_covered"])
    refused = invoke("train", "digits", "--budget", "b.json", "--output", "run3", *SHORT, code=2)
    assert "above the limit of 4.5" in refused
    assert not (tmp_path / "run3").exists()
    assert shown(file) == found


def test_an_adaptive_budget_says_what_share_is_used(tmp_path: Path) -> None:
    file, said = tmp_path / "a.json", ("--adaptive", "--json")
    made = json.loads(invoke("budget", "new", file, "--epsilon", 8, "--delta", 1e-4, *said))
    assert (made["adaptive"], made["share_used"]) == (True, None)
    facts = {"noise_multiplier": 2.0, "sampling_prob": 0.1, "num_steps": 20}
    BudgetFile(file).enter(CountedRun(identity="a", name="a", began="2026", **facts), "data")
    found = shown(file)
    assert found["together"]["epsilon"] == 8
    assert (found["left"], found["with_another_like_the_last"]) == (None, None)
    share = f"{found['share_used']:.1%} of it is used"
    assert 0.0 < found["share_used"] < 1.0
    assert share in " ".join(invoke("budget", "show", file).split())
    assert "adaptive" in invoke("budget", "new", tmp_path / "n", "--delta", 1e-4, *said, code=2)


@pytest.mark.slow
def test_a_run_that_goes_on_and_its_audit_use_the_folder_s_budget(
    file: Path, tmp_path: Path
) -> None:
    run = ["--epsilon", 1, "--output", "run", *SHORT]
    invoke("train", "digits", "--budget", "b.json", *run)
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert config["privacy"]["budget"] == str(file)
    assert config.get("seed") is None
    invoke("audit", "run-folder", "run", "--canaries", 20, "--json")
    first, audit = shown(file)["runs"]
    assert audit["name"] == "audit, 20 canaries"
    assert audit["num_steps"] == first["num_steps"]
    assert audit["noise_multiplier"] == first["noise_multiplier"]
    refused = invoke(
        "audit", "run-folder", "run", "--canaries", 20, "--input-canaries", 5, "--json", code=2
    )
    assert "gradient canaries alone" in refused
    assert len(shown(file)["runs"]) == 2


def test_a_damaged_file_is_one_line_and_ends_everything(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("4.5", "45.0"))
    for command in (
        ["budget", "show", "b.json"],
        ["train", "digits", "--budget", "b.json", "--output", "run", *SHORT],
        ["audit", "run", "--budget", "b.json", "--input-canaries", 0],
    ):
        assert "damaged, so nobody knows what was spent" in invoke(*command, code=2)
    assert not (tmp_path / "run").exists()


def test_a_missing_file_says_how_to_make_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoke("train", "digits", "--budget", "no.json", "--output", "run", *SHORT, code=2)
    assert "shuffled-dpsgd budget new" in refused
    assert "FILE: expected a new file" in (
        invoke("budget", "new", "a.json", "--delta", 1e-5)
        + invoke("budget", "new", "a.json", "--delta", 1e-5, code=2)
    )


def test_a_budget_in_a_file_of_settings_is_beside_that_file(tmp_path: Path) -> None:
    from shuffled_dpsgd.tasks.config_files import place_paths

    raw = {"privacy": {"budget": "b.json"}}
    place_paths(raw, tmp_path / "folder")
    assert raw["privacy"]["budget"] == str(tmp_path / "folder" / "b.json")


def test_what_replays_records_without_noise_is_refused(tmp_path: Path) -> None:
    """Neither is the budget's file read nor any record."""
    file = tmp_path / "run.toml"
    file.write_text(toml(settings("digits", privacy__budget="b.json")))
    said = invoke("audit", "sensitivity", "--config", file, "--records", 2, code=2)
    assert "budget: expected none for what is shown without noise" in " ".join(said.split())
