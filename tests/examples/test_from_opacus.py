"""Every block of `docs/from_opacus.md` runs: ours, and theirs where Opacus is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shuffled_dpsgd import fix_model, make_private, save_checkpoint

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from_opacus.md").read_text(encoding="utf-8")
SECTIONS = {
    int(number): re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for number, text in re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.M)
}
# What has to run before a section can.
BEFORE = {"theirs": {2: (1,), 3: (1, 2), 6: (1,), 10: (1,)}}
BEFORE["ours"] = {2: (1,), 3: (1, 2), 7: (1,), 10: (1,)}


def prelude(folder: Path, *, batch_norm: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if batch_norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))
    data = TensorDataset(torch.randn(200, 6), torch.randint(3, (200,)))
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": data,
        "loader": DataLoader(data, batch_size=20),
        "folder": folder,
        "plan": {
            "dataset_size": 200,
            "expected_batch_size": 20,
            "noise_multiplier": 1.1,
            "delta": 1e-5,
            "num_steps": 20,
        },
    }


def run(whose: str, section: int, names: dict[str, Any]) -> None:
    for number in (*BEFORE[whose].get(section, ()), section):
        theirs, ours = SECTIONS[number]
        assert theirs.startswith("# Opacus")
        assert ours.startswith("# here")
        exec(theirs if whose == "theirs" else ours, names)


def test_there_are_ten_pairs() -> None:
    assert list(SECTIONS) == list(range(1, 11))
    assert all(len(blocks) == 2 for blocks in SECTIONS.values())


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_ours(section: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = prelude(tmp_path, batch_norm=section == 5)
    names |= {
        "make_private": make_private, "fix_model": fix_model, "save_checkpoint": save_checkpoint,
    }  # fmt: skip
    run("ours", section, names)
    if section == 3:
        printed = capsys.readouterr().out.strip()
        shown = re.search(r"prints (\S+ \(proven\))", PAGE)
        assert shown is not None
        assert printed == f"ε = {shown[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_theirs(section: int, tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    from opacus import PrivacyEngine
    from opacus.layers import DPLSTM
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.validators import ModuleValidator

    names = prelude(tmp_path, batch_norm=section == 5)
    names |= {
        "PrivacyEngine": PrivacyEngine, "DPLSTM": DPLSTM,
        "BatchMemoryManager": BatchMemoryManager, "ModuleValidator": ModuleValidator,
    }  # fmt: skip
    run("theirs", section, names)
