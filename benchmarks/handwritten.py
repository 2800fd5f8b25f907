"""Transformers as people write them themselves: a vision one and a language model in plain torch.

Queries, keys and values are layers of their own, the language model's head shares no weight with
its table, and no class is one that the library knows by name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PATCH = 16


class Output(NamedTuple):
    """Called as Hugging Face's models are, these give the same."""

    logits: Tensor


class Perceptron(nn.Sequential):
    """Three layers, whose steps take as long as Python takes."""

    def __init__(self, width: int, classes: int) -> None:
        hidden = [nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()]
        super().__init__(*hidden, nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a layer norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before_attention(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    """ViT-B unless told otherwise; images of `side` pixels."""

    def __init__(
        self, side: int, classes: int, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads, 0.0, False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pixel_values: Tensor) -> Output:
        patches = self.patches(pixel_values).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(patches), -1, -1)
        x = torch.cat([first, patches], 1) + self.positions
        return Output(self.head(self.norm(self.blocks(x))[:, 0]))


class LanguageModel(nn.Module):
    """GPT-2 small unless told otherwise, but for its head."""

    def __init__(
        self,
        length: int,
        vocabulary: int = 50257,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, 0.1, True) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Output:
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.tokens(input_ids) + self.positions(places)
        return Output(self.head(self.norm(self.blocks(x))))
