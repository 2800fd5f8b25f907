"""Which launches move a set of tensors, and which part of which tensor each program takes.

Worked out once per spec: nothing here depends on addresses or draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

# What one program holds, in bytes, and how much of it a warp. Columns: short rows share a program,
# which is small, so that many run at once. Rows: half of what registers take at most; but a sector
# of memory wide at least, if they take that.
PROGRAM_BYTES = {"columns": 16 << 10, "rows": 64 << 10}
BYTES_PER_WARP = {"columns": 2 << 10, "rows": 8 << 10}
_MOST_BYTES = 128 << 10
_SECTOR_BYTES = 32
_WIDEST_SLAB_BYTES = 512
_VECTOR_BYTES = 16

Pass = Literal["columns", "rows"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tensor seen as a matrix, with the starts of the indices of its rows and columns."""

    rows: int
    cols: int
    row_start: int | None
    col_start: int | None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program holds in a pass, and the alignment in bytes of every row of its tensors."""

    moving: Pass
    rows: int
    cols: int
    alignment: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One pass over all tensors that share a tile."""

    tile: Tile
    warps: int
    jobs: torch.Tensor
    programs: torch.Tensor


def build_launches(shapes: Sequence[Shape], size: int, device: torch.device) -> tuple[Launch, ...]:
    """Columns first, then rows: the passes commute, and a tensor may need either or both."""
    columns: dict[Tile, list[tuple[int, ...]]] = {}
    rows: dict[Tile, list[tuple[int, ...]]] = {}
    for place, shape in enumerate(shapes):
        matrix = (place, shape.rows, shape.cols)
        if shape.col_start is not None:
            tile = tile_of(shape, "columns", size)
            columns.setdefault(tile, []).append((*matrix, shape.col_start))
        if shape.row_start is not None:
            tile = tile_of(shape, "rows", size)
            rows.setdefault(tile, []).append((*matrix, shape.row_start))
    return tuple(
        _launch(tile, jobs, size, device)
        for by_tile in (columns, rows)
        for tile, jobs in by_tile.items()
    )


def tile_of(shape: Shape, moving: Pass, size: int) -> Tile:
    """The region one program moves: whole along the moving axis, powers of two along both."""
    whole = 1 << ((shape.cols if moving == "columns" else shape.rows) - 1).bit_length()
    across = PROGRAM_BYTES[moving] // whole
    if moving == "columns":
        return Tile(moving=moving, rows=max(across // size, 1), cols=whole, alignment=size)
    across = max(across, min(_SECTOR_BYTES, _MOST_BYTES // whole))
    cols = max(min(across, _WIDEST_SLAB_BYTES) // size, 1)
    alignment = math.gcd(shape.cols * size, cols * size, _VECTOR_BYTES)
    return Tile(moving=moving, rows=whole, cols=cols, alignment=alignment)


def num_warps(tile: Tile, size: int) -> int:
    """Warps for a tile; an element takes a register of 4 bytes even if it is smaller."""
    held = tile.rows * tile.cols * max(size, 4)
    return min(max(held // BYTES_PER_WARP[tile.moving], 4), 32)


def _launch(tile: Tile, jobs: Sequence[tuple[int, ...]], size: int, device: torch.device) -> Launch:
    """The jobs as the kernels read them, each with the first of the programs that do it."""
    fields = torch.tensor(jobs)
    rows, cols = fields[:, 1], fields[:, 2]
    whole, block = (rows, tile.rows) if tile.moving == "columns" else (cols, tile.cols)
    programs = (whole + block - 1) // block
    first = programs.cumsum(0) - programs
    owners = torch.arange(len(jobs), dtype=torch.int32).repeat_interleave(programs)
    return Launch(
        tile=tile,
        warps=num_warps(tile, size),
        jobs=torch.cat([fields, first[:, None]], dim=1).to(device),
        programs=owners.to(device),
    )
