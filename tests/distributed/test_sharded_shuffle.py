"""Weights that `fully_shard` has spread over ranks are shuffled where they lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed.launching import Launcher
from shuffled_dpsgd.permutation.sharded import find_transfer
from shuffled_dpsgd.runtime.shards import RowSplit

HERE = "distributed.shards"


@pytest.mark.parametrize(
    ("name", "scope", "ranks"),
    [
        ("bert", "full", 2),
        ("gpt2", "full", 3),
        ("vit", "paper", 1),
        pytest.param("vit", "full", 4, marks=pytest.mark.slow),
        pytest.param("gpt2", "paper", 4, marks=pytest.mark.slow),
    ],
)
def test_shards_move_as_whole_tensors_do(
    launcher: Launcher, name: str, scope: str, ranks: int
) -> None:
    """Weights and Adam's moments, bit for bit, by an all-to-all and nothing else; then back."""
    for found in launcher.run(HERE, "shuffled", ranks=ranks, name=name, scope=scope):
        assert all(found.values()), found


@given(rows=st.integers(1, 40), ranks=st.integers(1, 6), seed=st.integers(0, 9))
def test_routes_carry_every_row_to_its_place(rows: int, ranks: int, seed: int) -> None:
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    split = RowSplit(rows=rows, ranks=ranks)
    transfers = [find_transfer(index, split, rank) for rank in range(ranks)]
    found: list[int] = []
    for rank in range(ranks):
        low, high = split.span(rank)
        placed = torch.full((high - low,), -1)
        arriving: list[int] = []
        for giver in range(ranks):
            sent = transfers[giver].sent.split(transfers[giver].sent_to)[rank]
            assert len(sent) == transfers[rank].got_from[giver]
            arriving += (sent + split.span(giver).low).tolist()
        placed[transfers[rank].arriving_at] = torch.tensor(arriving, dtype=torch.int64)
        found += placed.tolist()
    assert found == index.tolist()
