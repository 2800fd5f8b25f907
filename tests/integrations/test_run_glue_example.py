"""The example runs offline on a tiny BERT and made-up sentences, and changes under ten lines."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "run_glue_private.py"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "plot", "very"]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_rows(path: Path, num_rows: int) -> Path:
    rows = [
        {
            "sentence": f"very {'good' if i % 2 else 'bad'} {'film' if i % 3 else 'plot'}",
            "label": i % 2,
        }
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_fewer_than_ten_lines_are_changed() -> None:
    lines = EXAMPLE.read_text().splitlines()
    changed = [line for line in lines if "  # private" in line]
    assert 0 < len(changed) < 10
    assert len(lines) < 150


@pytest.mark.filterwarnings("ignore:the most frequent row")
def test_example_runs_offline(
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    options = {
        "model_name_or_path": model_folder,
        "train_file": write_rows(tmp_path / "train.json", 24),
        "validation_file": write_rows(tmp_path / "dev.json", 8),
        "output_dir": tmp_path / "out",
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "epsilon": 4,
        "delta": 1e-3,
        "clip_norm": 0.1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["run_glue_private.py", *flags])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "(proven)" in printed
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "## Privacy" in readme
    assert "(proven)" in readme
    assert (tmp_path / "out" / "model.safetensors").exists()
    card = json.loads((tmp_path / "out" / "privacy_card.json").read_text())
    assert card["certified"]["epsilon"] <= 4
    assert card["steps_released"] == 3
