"""`shuffled-dpsgd verify` on a card and saved weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.training.released_weights import describe_weights


def test_saved_weights_are_compared_with_the_card(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    card, saved = tmp_path / "privacy_card.json", tmp_path / "weights.pt"
    card.write_text(json.dumps({"weights": describe_weights(model)}), encoding="utf-8")
    torch.save(model.state_dict(), saved)
    done = CliRunner().invoke(app, ["verify", str(card), str(saved)])
    assert done.exit_code == 0
    assert "2 trained tensors" in done.output
    done = CliRunner().invoke(app, ["verify", str(card), str(saved), "--json"])
    assert json.loads(done.output)["trained_tensors"] == 2
    torch.save(torch.nn.Linear(3, 2).state_dict(), saved)
    done = CliRunner().invoke(app, ["verify", str(card), str(saved)])
    assert done.exit_code == 2
    assert "2 of 2 trained tensors that are others" in done.output
    card.write_text("no JSON", encoding="utf-8")
    done = CliRunner().invoke(app, ["verify", str(card), str(saved)])
    assert (done.exit_code, "a card as JSON" in done.output) == (2, True)
