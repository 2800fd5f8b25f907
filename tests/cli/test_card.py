"""`shuffled-dpsgd card`, for a card of an own loop; those of folders are in test_use.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shuffled_dpsgd import make_private
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.training import write_card
from shuffled_dpsgd.training.planning import plan_from_json
from shuffled_dpsgd.training.saved_card import read_card


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The card of a loop of one's own, as `dumps` writes it, beside its ledger."""
    return save_card(tmp_path_factory.mktemp("card"), seed=None)


def save_card(folder: Path, seed: int | None) -> Path:
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=40,
        expected_batch_size=10,
        num_steps=2,
        epsilon=3.0,
        delta=1e-3,
        clip_norm=1.0,
        shuffle="off",
        seed=seed,
        ledger_path=folder / "ledger.jsonl",
    )
    for x, y in private.batches(data):
        private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        private.step()
    private.release()
    path = folder / "privacy_card.json"
    path.write_text(private.card().dumps(), encoding="utf-8")
    private.close()
    return path


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("registry", "url_slug: model-data-20"),
        ("nist", "# Checklist after NIST SP 800-226"),
        ("markdown", "---\ntags:"),
        ("json", "{"),
        ("html", "<!doctype html>"),
    ],
)
def test_every_format(saved: Path, tmp_path: Path, form: str, start: str) -> None:
    text = run("card", saved, "--format", form).stdout
    assert text.startswith(start)
    told = run("card", saved, "--format", form, "--output", tmp_path / "card", "--json")
    assert (tmp_path / "card").read_text(encoding="utf-8") == text
    assert json.loads(told.stdout)["text"] == text
    again = run("card", saved, "--format", form, "--output", tmp_path / "card", code=2)
    assert "not there yet" in again.output


def test_what_is_no_card_is_refused(saved: Path, tmp_path: Path) -> None:
    assert "no privacy card" in run("card", tmp_path, code=2).output
    broken = tmp_path / "privacy_card.json"
    data = json.loads(saved.read_text(encoding="utf-8"))
    data["certified"]["inputs"]["noise_multiplier"] = 99.0
    for text in (json.dumps(data), "{}", "no JSON", "[1]"):
        broken.write_text(text, encoding="utf-8")
        assert "not a privacy card of this version" in run("card", tmp_path, code=2).output


@pytest.mark.parametrize("seed", [None, 3])
def test_a_folder_whose_ledger_says_otherwise_is_refused(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, seed: int | None
) -> None:
    """A card that another plan, or fewer steps, would have given is consistent in itself."""
    saved = save_card(tmp_path_factory.mktemp("saved"), seed)
    card = read_card(saved)
    shutil.copytree(saved.parent, tmp_path, dirs_exist_ok=True)
    assert read_card(tmp_path) == card
    plan = plan_from_json(card.plan)
    blocks = tuple(replace(block, noise_multiplier=9.0) for block in plan.blocks)
    fewer = write_card(plan, num_steps=1)
    quieter = write_card(replace(plan, blocks=blocks), num_steps=2)
    for other, why in ((fewer, "1 of 2 steps, and"), (quieter, "ledger of plan")):
        (tmp_path / saved.name).write_text(other.dumps(), encoding="utf-8")
        read_card(tmp_path / saved.name)
        assert why in " ".join(run("card", tmp_path, code=2).output.split())
    shutil.copy(saved, tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    torn = ledger.read_bytes() + b'{"step"'
    ledger.write_bytes(torn)
    assert read_card(tmp_path) == card
    assert ledger.read_bytes() == torn, "a run may still write to it"
    ledger.write_text("no ledger\n", encoding="utf-8")
    assert "not the ledger of" in run("card", tmp_path, code=2).output
    shutil.copy(saved.parent / ledger.name, ledger)
    (tmp_path / "_ledger.jsonl.key").unlink()
    assert "_ledger.jsonl.key" in run("card", tmp_path, code=2).output
