"""What docs/errata.md shows in code and arithmetic is what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd_experiments.presets import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "errata.md").read_text(encoding="utf-8")


def test_independent_permutations_break_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with torch.random.fork_rng():
        exec(code, {})
    shared, own = (
        float(found) for found in re.findall(r"tensor\(([^,)]+)", capsys.readouterr().out)
    )
    assert shared < 1e-6
    assert own > 0.1


def test_softmax_is_not_elementwise() -> None:
    assert torch.tensor([0.0, 9.0]).softmax(0)[0] != torch.tensor([0.0, 0.0]).softmax(0)[0]


def test_counts_and_deltas() -> None:
    assert 774_030_080 + 50_257 * 1_280 == 838_359_040
    for name, printed in (("e2e", "1.19e-5"), ("dart", "8.25e-6")):
        size = PRESETS[f"paper/gpt2-{name}"].dataset_size
        assert 1 / (2 * size) == pytest.approx(float(printed), rel=0.005)
        assert f"{size:,}" in PAGE
        assert printed in PAGE
