"""The GPU kernels for tables against their plain definitions: on a GPU, else in the interpreter.

Skipped where Triton is not installed.
"""

from __future__ import annotations

import pytest
import torch

from on_triton import DEVICE, ON_GPU, cases, draw
from shuffled_dpsgd.clipping.kernels import plain
from shuffled_dpsgd.clipping.kernels.triton import tables as triton_tables


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens fill several blocks of the kernels for tables."""
    if not ON_GPU:
        for name in ("FEATURES", "PICK_T", "PICK_S", "BLOCK_S", "BLOCK_D", "CHUNK"):
            monkeypatch.setattr(triton_tables, name, 16)
        monkeypatch.setattr(triton_tables, "ALL", 16)
        monkeypatch.setattr(triton_tables, "LOOK", 8)
        monkeypatch.setattr(triton_tables, "ROWS", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("rows", cases(2, 9, 40, interpreted=[9]))
def test_tables_and_those_tied_to_a_head(
    rows: int, padding_idx: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "MAX_TEMPORARY_ELEMENTS", 19 * 21)
    B, T, S, D = 2, 19, 21, 24
    ids = torch.randint(rows, (B, S), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x, gl = draw(B, T, D, seed=0), draw(B, T, rows, seed=1)
    for ge in (draw(B, S, D, seed=2, dtype=torch.float32), draw(B, D, S, seed=2).float().mT):
        found = triton_tables.embedding_sq_norms(ids, ge, padding_idx)
        expected = plain.embedding_sq_norms(ids, ge.double(), padding_idx)
        assert ((found - expected) / expected).abs().max() < 1e-5
        assert (found >= expected * (1 - 1e-7)).all()
        cross = triton_tables.tied_cross_terms(x, gl, ids, ge, padding_idx).double()
        expected = plain.tied_cross_terms(x.double(), gl.double(), ids, ge.double(), padding_idx)
        assert (cross >= expected).all()
        assert (cross - expected).max() < 1e-5 * x.norm() * gl.norm() * ge.norm()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sums_of_tables(dtype: torch.dtype, padding_idx: int | None) -> None:
    B, T, D, V = 3, 19, 24, 9
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    factors = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    for g in (draw(B, T, D, seed=0, dtype=dtype), draw(B, D, T, seed=0, dtype=dtype).mT):
        g[1, 3, 5] = float("nan")
        found, expected = torch.ones(V, D, device=DEVICE), torch.ones(V, D, device=DEVICE)
        triton_tables.weighted_embedding_sum(ids, g, factors, padding_idx, found)
        plain.weighted_embedding_sum(ids, g, factors, padding_idx, expected)
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_cross_terms_of_a_stored_head(padding_idx: int | None) -> None:
    B, S, D, V = 3, 19, 24, 9
    ids = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    head = draw(B, V, D, seed=1, dtype=torch.float32)
    for ge in (draw(B, S, D, seed=2, dtype=torch.float32), draw(B, D, S, seed=2).mT):
        found = triton_tables.stored_cross_terms(head, ids, ge, padding_idx)
        expected = plain.stored_cross_terms(head.double(), ids, ge.double(), padding_idx)
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_a_poisoned_row_of_a_table_spoils_no_other_sample() -> None:
    ids = torch.arange(19, device=DEVICE).repeat(3, 1) % 7
    g = draw(3, 19, 24, seed=0, dtype=torch.float32)
    clean = triton_tables.embedding_sq_norms(ids, g, None)
    g[1, 18, 20] = float("inf")
    found = triton_tables.embedding_sq_norms(ids, g, None)
    assert found.isfinite().tolist() == [True, False, True]
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
