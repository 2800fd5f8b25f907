"""A finished run is audited from its folder alone, and the outcome is on its card everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.test_bad_input import run_file
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.tasks.audited import SECOND_RUN

pytest.importorskip("transformers")
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    arguments = run_file(folder, "digits", training__expected_batch_size=40)
    assert CliRunner().invoke(app, [*arguments, "--json"]).exit_code == 0
    return folder / "out"


def audit(folder: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", "run-folder", str(folder), *more])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.stderr


def test_the_bounds_reach_every_form_of_the_card(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = json.loads((folder / "privacy_card.json").read_text())
    status, printed = audit(folder, "--canaries", "30", "--input-canaries", "0", "--json")
    assert status == 0, printed
    report = json.loads(printed)
    card = json.loads((folder / "privacy_card.json").read_text())
    assert card == report["card"]
    assert [bound["kind"] for bound in card["audits"]] == len(card["audits"]) * ["measured"]
    assert card["audits"]
    assert card["verdicts"]["certified"] == "consistent with the audit"
    assert SECOND_RUN in card["not_covered"]
    for key in (
        "subject",
        "certified",
        "paper",
        "mechanism",
        "shuffle",
        "steps_released",
        "checks",
    ):
        assert card[key] == before[key]
    for name in ("privacy_card.txt", "privacy_card.html", "report.html"):
        text = (folder / name).read_text()
        assert "in a repeat of the run with canaries" in text
        assert "none run" not in text
    assert json.loads((folder / "summary.json").read_text())["privacy_card"] == card
    assert (folder / "audit" / "report.json").is_file()
    assert not list(folder.glob(".*.new"))


@pytest.mark.slow
def test_the_repeat_has_the_runs_noise_and_steps_and_membership_is_in_the_report_alone(
    finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    _, printed = audit(folder, "--canaries", "20", "--input-canaries", "10", "--json")
    plan = json.loads(printed)["setting"]["plan"]
    assert plan["num_steps"] == 2
    assert plan["dataset_size"] == 1437 + 10
    assert {block["noise_multiplier"] for block in plan["blocks"]} == {1.0}
    assert "loss threshold" not in (folder / "privacy_card.txt").read_text()
    again, _ = audit(folder, "--canaries", "20", "--input-canaries", "10")
    page = (folder / "report.html").read_text()
    assert again == 0
    assert page.count('<section class="membership">') == 1
    assert page.count('<section class="card">') == 1
    membership = json.loads((folder / "audit" / "report.json").read_text())["membership"]
    for trained in ("with privacy", "without privacy"):
        area = membership[trained.replace(" ", "_")]
        shown = f"{area['area']:.3f} (95 %: {area['low']:.3f} to {area['high']:.3f})"
        assert f"trained {trained}" in page
        assert shown in page
    assert "no ε covers publishing them" in page


def test_what_is_not_a_finished_run_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    weights = folder / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\0\0\1")
    for expected in ("not the weights", "not finished", "no run.json"):
        card = (folder / "privacy_card.txt").read_bytes()
        status, said = audit(folder)
        assert status == 2
        assert expected in said
        assert len(said.strip().splitlines()) == 1
        assert (folder / "privacy_card.txt").read_bytes() == card
        if expected == "not the weights":
            (folder / "summary.json").unlink()
        else:
            (folder / "run.json").unlink(missing_ok=True)
