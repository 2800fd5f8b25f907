"""The example for chats runs offline on a tiny model, and changes five lines of TRL's at most."""

from __future__ import annotations

import ast
import difflib
import json
import runpy
import sys
from pathlib import Path

import pytest

from integrations.tiny_llms import llama, records, tokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "chat_lora_private.py"


def stock_version(script: str) -> str:
    """The script without privacy."""
    kept = [line for line in script.splitlines() if not line.endswith("  # private")]
    kept.insert(kept.index("def main() -> None:") - 2, "from trl import SFTTrainer")
    kept.insert(kept.index("        model=given.model,"), "    trainer = SFTTrainer(")
    return "\n".join(kept) + "\n"


def test_at_most_five_lines_differ_from_an_ordinary_script() -> None:
    script = EXAMPLE.read_text(encoding="utf-8")
    stock = stock_version(script)
    ast.parse(stock)
    code = stock[stock.index("from __future__") :].lower()
    assert not any(word in code for word in ("shuffled_dpsgd", "privacy", "dpsft", "epsilon"))
    changes = [*difflib.ndiff(stock.splitlines(), script.splitlines())]
    assert 0 < sum(line.startswith("+ ") for line in changes) <= 5


@pytest.mark.filterwarnings("ignore")
def test_it_runs_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    records("chat", 60).to_json(tmp_path / "chats.jsonl")
    flags = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "chats.jsonl")]
    flags += ["--output", str(tmp_path / "out"), "--steps", "1", "--cpu"]
    flags += ["--accumulate", "2"]
    monkeypatch.setattr(sys, "argv", ["chat_lora_private.py", *flags])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "(proven)" in capsys.readouterr().out
    card = json.loads((tmp_path / "out" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["certified"]["epsilon"] <= 8
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
