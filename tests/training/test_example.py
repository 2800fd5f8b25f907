"""The example runs as a user would run it, and ends with weights and a card."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_private.py"


@pytest.mark.parametrize("accounting", ["certified", "paper"])
def test_example_trains_and_writes_a_card(
    accounting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    options = ["--records", "64", "--epochs", "2", "--accounting", accounting]
    options += ["--batch-clip-norm", "4", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train_private.py", *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "held-out accuracy" in printed
    assert "(proven)" in printed
    card = json.loads((tmp_path / "privacy_card.json").read_text())
    assert card["steps_released"] == 16
    target = card["certified" if accounting == "certified" else "paper"]
    assert target["epsilon"] == pytest.approx(8.0, rel=0.01)
    assert (tmp_path / "checkpoint-00000016" / "model.safetensors").exists()
