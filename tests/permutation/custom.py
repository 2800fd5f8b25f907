"""Models no family knows: what a trace proves may move, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from permutation.zoo import BATCH, LABELS, LENGTH, VOCAB, Specimen, randomise


class Encoder(nn.Module):
    """Embeddings, PyTorch's encoder, a linear head on the first token."""

    def __init__(self, *, norm_first: bool = False, activation: str = "gelu") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.position = nn.Parameter(torch.zeros(LENGTH, 24))
        layer = nn.TransformerEncoderLayer(
            24, 3, 40, batch_first=True, norm_first=norm_first, activation=activation
        )
        norm = nn.LayerNorm(24) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)
        self.head = nn.Linear(24, LABELS)

    def forward(self, input_ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids) + self.position
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x[..., 0, :])


class CrossAttention(nn.Module):
    """Attention with its own key and value widths, bias tokens, and a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(5, 12)
        self.memory = nn.Linear(5, 6)
        self.attend = nn.MultiheadAttention(
            12, 3, kdim=6, vdim=6, add_bias_kv=True, batch_first=True
        )
        self.decode = nn.TransformerDecoderLayer(12, 2, 20, batch_first=True)
        self.head = nn.Linear(12, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        memory = self.memory(x).tanh()
        attended, _ = self.attend(query, memory, memory, need_weights=False)
        decoded = self.decode(query + attended, torch.relu(attended))
        return self.head(decoded[..., -1, :])


class Residual(nn.Module):
    """Gated hidden units between sums and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 12)
        self.norm = nn.LayerNorm(12)
        self.gate = nn.Linear(12, 20)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.head = nn.Linear(12, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        inner = self.norm(x)
        x = x + 0.5 * self.down(F.silu(self.gate(inner)) * self.up(inner)) / 2
        return self.head(x)


class SharedLayer(nn.Module):
    """One square layer applied three times: its input and output features are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 12)
        self.loop = nn.Linear(12, 12)
        self.head = nn.Linear(12, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for _ in range(3):
            x = torch.tanh(self.loop(x))
        return self.head(x)


def _rows() -> torch.Tensor:
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(4))


def _classes(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % LABELS, reduction="none")


def _text_specimen(model: nn.Module) -> Specimen:
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, -3:] = True
    batch = {"input_ids": ids, "padding": padding}
    return Specimen(model=randomise(model).train(), batch=batch, losses=_classes)


def _specimen(model: nn.Module, name: str = "x") -> Specimen:
    x = _rows() if not isinstance(model, CrossAttention) else _rows()[:, None].repeat(1, 3, 1)
    return Specimen(model=randomise(model), batch={name: x}, losses=_classes)


def _without_dropout(specimen: Specimen) -> Specimen:
    for module in specimen.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return specimen


CUSTOM: dict[str, Callable[[], Specimen]] = {
    "sequential": lambda: _specimen(
        nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, LABELS)), "input"
    ),
    "gated-residual": lambda: _specimen(Residual()),
    "shared-layer": lambda: _specimen(SharedLayer()),
    "cross-attention": lambda: _specimen(CrossAttention()),
    "encoder": lambda: _without_dropout(_text_specimen(Encoder())),
    "encoder-norm-first": lambda: _without_dropout(
        _text_specimen(Encoder(norm_first=True, activation="relu"))
    ),
}
