"""Layers that are finalized together have the norms and sums they have one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.contributions import cost


@pytest.mark.parametrize("backend", [cost.NormMethod.GRAM, cost.NormMethod.TILES])
def test_layers_finalized_together_by_either_backend_agree_with_stored_gradients(
    backend: cost.NormMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 4)]
    model = nn.Sequential(*layers, nn.Linear(4, 6), nn.Linear(6, 6)).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)

    def clipped(strategy: str) -> tuple[Tensor, dict[str, Tensor]]:
        engine = ClippingEngine(model, clip_norm=0.1, strategy=strategy)
        with engine:
            engine.backward(model(x).square().sum((1, 2)))
        return engine.sample_norms, engine.clipped_sum()

    expected_norms, expected = clipped("instantiate")
    monkeypatch.setitem(cost.STRATEGIES, "bookkeeping", lambda *_: backend)
    norms, sums = clipped("bookkeeping")
    torch.testing.assert_close(norms, expected_norms)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name])
