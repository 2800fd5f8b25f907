"""Theorems 1 and 2 of the paper, and their exact extensions, as groups over ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shuffled_dpsgd.permutation.describe.ports import Port
from shuffled_dpsgd.permutation.describe.sketch import Sketch
from shuffled_dpsgd.permutation.spec import Block


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Ports and sizes of one attention layer.

    `query`, `key` and `value` write the projections; `output` reads the attended values. Head h
    owns positions [h * head_dim, (h + 1) * head_dim) of each; with fewer key/value heads, query
    head h reads key/value head h // (num_heads // num_kv_heads).
    """

    query: Sequence[Port]
    key: Sequence[Port]
    value: Sequence[Port]
    output: Sequence[Port]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: bool

    @property
    def queries_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads


def feed_forward(
    sketch: Sketch, name: str, up: Sequence[Sequence[Port]], down: Sequence[Port]
) -> None:
    """Theorem 1: hidden units move together through an elementwise activation.

    Gated units (several `up`) multiply entry by entry, so they share the permutation.
    """
    size = sketch.size(up[0][0])
    sketch.add("mlp-hidden", name, size, [(ports, Block()) for ports in (*up, down)])


def attention(sketch: Sketch, name: str, layer: Attention) -> None:
    """Theorem 2, and in scope 'full' per-head value permutations and whole heads."""
    if not layer.rotary:
        _query_key(sketch, name, layer)
    if sketch.scope == "paper":
        _shared_value(sketch, name, layer)
    else:
        _value_per_head(sketch, name, layer)
        _heads(sketch, name, layer)


def _query_key(sketch: Sketch, name: str, layer: Attention) -> None:
    """Scores are inner products over the head dimension, so Q and K may permute it together.

    Rotary embeddings rotate fixed pairs of dimensions and rule this out. Query heads that share
    a key head share its permutation.
    """
    for head in range(layer.num_kv_heads):
        sketch.add(
            "query-key",
            f"{name}.query_key.{head}",
            layer.head_dim,
            [(layer.query, _query_block(layer, head)), (layer.key, _kv_block(layer, head))],
        )


def _shared_value(sketch: Sketch, name: str, layer: Attention) -> None:
    """One permutation of the value dimension for all heads, as Theorem 2 states it."""
    every = layer.head_dim
    sketch.add(
        "value-output",
        f"{name}.value_output",
        layer.head_dim,
        [
            (layer.value, Block(repeats=layer.num_kv_heads, repeat_every=every)),
            (layer.output, Block(repeats=layer.num_heads, repeat_every=every)),
        ],
    )


def _value_per_head(sketch: Sketch, name: str, layer: Attention) -> None:
    for head in range(layer.num_kv_heads):
        sketch.add(
            "value-output",
            f"{name}.value_output.{head}",
            layer.head_dim,
            [(layer.value, _kv_block(layer, head)), (layer.output, _query_block(layer, head))],
        )


def _heads(sketch: Sketch, name: str, layer: Attention) -> None:
    """Whole heads may trade places: query heads inside their group, then whole groups."""
    shared = layer.queries_per_group
    for head in range(layer.num_kv_heads):
        block = Block(start=head * shared * layer.head_dim, width=layer.head_dim)
        sketch.add(
            "heads",
            f"{name}.query_heads.{head}",
            shared,
            [(layer.query, block), (layer.output, block)],
        )
    wide = Block(width=shared * layer.head_dim)
    narrow = Block(width=layer.head_dim)
    sketch.add(
        "heads",
        f"{name}.heads",
        layer.num_kv_heads,
        [(layer.query, wide), (layer.key, narrow), (layer.value, narrow), (layer.output, wide)],
    )


def _query_block(layer: Attention, head: int) -> Block:
    """All query heads that read key/value head `head`."""
    shared = layer.queries_per_group
    return Block(start=head * shared * layer.head_dim, repeats=shared, repeat_every=layer.head_dim)


def _kv_block(layer: Attention, head: int) -> Block:
    return Block(start=head * layer.head_dim)
