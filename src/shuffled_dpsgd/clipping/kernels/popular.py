"""Layers that many models have, so that their kernels can be compiled before a run begins.

Widths of linear maps are examples: a variant of a kernel depends on whether they are multiples of
16 or 64, and on nothing else. Lengths are one for each way in which samples of up to 128 tokens,
and those of an image of 14 by 14 patches, are cut into chunks (`gluon.products.cut_of`). This
module does without torch, as the processes that compile ahead do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# By falling popularity.
LENGTHS = (64, 128, 32, 80, 96, 16)
# The same where a block is the next power of two, and has room for more tokens.
UNEVEN_LENGTHS = (80, 48, 56, 24, 8)
IMAGE_LENGTH = 197
_WIDTH = 768
# Widths of norm layers, one for each of the next powers of two.
NORM_WIDTHS = (768, 384)
# That of GPT-2, which is odd, and to how many columns its gradients are padded.
_WORDS, _PADDED_WORDS = 50257, 50304
# A vocabulary that is rounded up.
_ROUND_WORDS = 30720


class TrialSizes(NamedTuple):
    """A small problem by which kernels of linear maps are tried."""

    samples: int
    tokens: int
    inputs: int
    outputs: int

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Those of x and of g, by sample and by token."""
        D, P = self.inputs, self.outputs
        return self.tokens * D, D, self.tokens * P, P


@dataclass(frozen=True, kw_only=True)
class PopularMap:
    """A linear map and how long its samples are.

    A `transposed` weight is stored as (inputs, outputs). Rows of output gradients have room for
    `row` numbers.
    """

    tokens: int
    outputs: int = _WIDTH
    row: int = _WIDTH
    has_bias: bool = True
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Samples, of which any number will do, tokens, inputs and outputs."""
        return 2, self.tokens, _WIDTH, self.outputs

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Those of inputs and of output gradients, by sample and by token."""
        return self.tokens * _WIDTH, _WIDTH, self.tokens * self.row, self.row

    @property
    def sum_strides(self) -> tuple[int, int]:
        """Those of a sum of gradients, by output and by input."""
        return (1, self.outputs) if self.transposed else (_WIDTH, 1)


def _maps(tokens: int) -> tuple[PopularMap, ...]:
    """The layers of encoders, those of GPT-2, its head, and heads and layers without a bias."""
    return (
        PopularMap(tokens=tokens),
        PopularMap(tokens=tokens, transposed=True),
        PopularMap(tokens=tokens, has_bias=False, outputs=_WORDS, row=_PADDED_WORDS),
        PopularMap(tokens=tokens, has_bias=False),
    )


POPULAR: tuple[PopularMap, ...] = (
    *(layer for tokens in LENGTHS for layer in _maps(tokens)),
    PopularMap(tokens=IMAGE_LENGTH),
)

# Heads over a vocabulary, of all lengths.
HEADS: tuple[PopularMap, ...] = tuple(
    PopularMap(tokens=tokens, has_bias=False, outputs=outputs, row=row)
    for tokens in dict.fromkeys((*LENGTHS, *UNEVEN_LENGTHS))
    for outputs, row in ((_WORDS, _PADDED_WORDS), (_ROUND_WORDS, _ROUND_WORDS))
)
