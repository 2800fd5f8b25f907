"""Golden losses: a short seeded run must keep giving what it gave, noise and batches included.

A change here means that seeded runs no longer repeat those of earlier versions. If that is wanted,
write the new curves with `python tests/golden/test_training_losses.py` and say so in the changelog.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.training import make_private

GOLDEN = Path(__file__).with_name("training_losses.json")
SETTINGS: dict[str, dict[str, Any]] = {
    "shuffle off": {"shuffle": "off"},
    "every step": {"shuffle": "every-step", "batch_clip_norm": 2.0},
    "two noises": {
        "shuffle": "at-release",
        "accounting": "paper",
        "batch_clip_norm": 1.0,
        "noise_multiplier": 0.3,
        "unshuffled_noise_multiplier": 1.5,
    },
}


def losses(**changes: Any) -> list[float]:
    """The losses of eight private steps of a small network on data made of sines."""
    grid = torch.arange(60 * 6, dtype=torch.float64).view(60, 6)
    data = TensorDataset(torch.sin(grid), (torch.sin(grid).sum(dim=1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            size = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(0.3 * torch.cos(number + size).view_as(parameter))
    private = make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        **{
            "dataset_size": 60,
            "expected_batch_size": 12,
            "num_steps": 8,
            "delta": 1e-3,
            "noise_multiplier": 0.8,
            "seed": 2024,
            **changes,
        },
    )
    found = []
    for batch in private.batches(data):
        private.backward(nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none"))
        if private.step() and private.last_metrics is not None:
            found.append(private.last_metrics.loss or 0.0)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_those_of_the_golden_run(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    assert losses(**SETTINGS[name]) == pytest.approx(golden, rel=1e-7)


if __name__ == "__main__":
    curves = {name: losses(**changes) for name, changes in SETTINGS.items()}
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
