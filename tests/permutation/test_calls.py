"""How a parent calls a described block decides what may move in it, if a trace shows the call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shuffled_dpsgd.permutation import discover, verify

WIDTH, HEADS, LENGTH = 8, 2, 4


class Attends(nn.Module):
    """Attention called in one of several ways, under a linear head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        masks = torch.zeros(3 * HEADS, LENGTH, LENGTH, dtype=torch.bool)
        masks[1::2] = torch.ones(LENGTH, LENGTH).triu(1).bool()
        self.register_buffer("masks", masks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "weights per head":
            found, shares = self.attention(x, x, x, average_attn_weights=False)
            return self.head(found) + shares[:, 0].mean(dim=1)[..., None] ** 2
        mask = self.masks if self.way == "mask per head" else None
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])


class Encodes(nn.Module):
    """PyTorch's encoder, a mask of the caller's if there is one, and a shortcut if asked for."""

    def __init__(self, shortcut: str = "") -> None:
        super().__init__()
        self.shortcut = shortcut
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = self.head(self.encoder(x, mask))
        if self.shortcut == "module":
            return found + self.encoder.layers[0].linear1(x)[..., :3]
        if self.shortcut == "weight":
            return found + torch.matmul(x, self.encoder.layers[0].linear1.weight[:3].t())
        return found


def moved_kinds(model: nn.Module) -> set[str]:
    return {group.kind for group in discover(model, scope="full").groups}


@pytest.mark.parametrize("way", ["plain", "weights per head", "mask per head"])
def test_heads_of_pytorchs_attention_stay_in_order(way: str) -> None:
    """Whoever calls it may tell them apart; what is inside a head moves."""
    torch.manual_seed(0)
    model = Attends(way)
    assert moved_kinds(model) == {"query-key", "value-output"}
    verify(model, torch.randn(3, LENGTH, WIDTH), scope="full")


@pytest.mark.parametrize("shortcut", ["module", "weight"])
@pytest.mark.parametrize("scope", ["paper", "full"])
def test_a_block_that_is_reached_into_stays(shortcut: str, scope: str) -> None:
    torch.manual_seed(0)
    model = Encodes(shortcut)
    spec = discover(model, scope=scope)  # type: ignore[arg-type]
    assert not [name for name in spec.moved_names if name.startswith("encoder.layers.0.linear")]
    assert any("encoder.layers.0.linear1" in n and "from outside" in n for n in spec.notes)
    assert "encoder.layers.1.linear1.weight" in spec.moved_names
    verify(model, torch.randn(3, LENGTH, WIDTH), spec)
