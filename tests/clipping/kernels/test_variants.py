"""Kernels are compiled in few variants, and found again on disk."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table

has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which has wheels for Linux"
)


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_every_table_begins_at_a_multiple_of_16_bytes(layers: int) -> None:
    """A kernel is compiled once more for one that does not."""
    columns = [[torch.zeros(1) for _ in range(layers)] for _ in range(4)]
    tables = address_table(columns, torch.device("cpu"))
    assert len(tables) == 4
    for table, column in zip(tables, columns, strict=True):
        assert table.data_ptr() % 16 == 0
        assert table[:layers].tolist() == [tensor.data_ptr() for tensor in column]


@has_triton
@pytest.mark.parametrize("name", ["products", "weighted_sums"])
def test_functions_in_gluon_are_hashed_when_they_are_imported(name: str) -> None:
    """In one order, whichever kernel is needed first: the hash is the kernel's name on disk."""
    from triton.runtime.jit import JITFunction

    module = importlib.import_module(f"shuffled_dpsgd.clipping.kernels.gluon.{name}")
    found = [f for f in vars(module).values() if isinstance(f, JITFunction)]
    assert found
    own = [f for f in found if f.fn.__module__.startswith("shuffled_dpsgd")]
    assert own
    assert all(function.hash is not None for function in own)


@has_triton
def test_lengths_with_as_many_chunks_share_a_kernel() -> None:
    products = importlib.import_module("shuffled_dpsgd.clipping.kernels.gluon.products")
    assert products.cut_of(65) == products.cut_of(80)
    assert products.cut_of(20) == products.cut_of(32)
    assert products.cut_of(40) == products.cut_of(64)
    assert products.cut_of(100) == products.cut_of(128)
    assert products.cut_of(80) != products.cut_of(81)
    tried = (128, 135, 144, 145, 192, 197, 208)
    few = [tokens for tokens in tried if products.cut_of(tokens)["HAS_FEW"]]
    assert few == [197, 208]
