"""The notebooks run as they stand, cell after cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("opacus")
NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").rglob("*.ipynb"))


def test_there_are_some() -> None:
    assert {"audit", "from_opacus", "llm_lora", "own_loop", "trainer"} == {
        path.stem for path in NOTEBOOKS
    }


QUICK = ("from_opacus", "own_loop", "trainer")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem in QUICK else pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        assert not cell.get("outputs"), "notebooks are kept without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "(proven)" in printed
    if "after" in names:
        right = [f"{thing} cost {price} coins" for thing, price in names["PRICES"].items()]
        assert sum(words in printed for words in right) >= 6, printed
        assert sum(words in str(names["before"]) for words in right) < 6
