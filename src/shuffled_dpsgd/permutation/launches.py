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
# A tensor that moves along both axes is read and written twice. Few enough at a time, the second
# pass finds them in the L2 cache; so many such chains at once keep the GPU busy between passes.
CHUNK_BYTES = 8 << 20
BRANCHES = 3

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


def build_branches(
    shapes: Sequence[Shape], size: int, device: torch.device
) -> tuple[tuple[Launch, ...], ...]:
    """All launches for these tensors; those of one branch must follow one another.

    Columns go before rows; the passes commute, and a tensor may need either or both. No tensor is
    in two branches.
    """
    branches: list[list[Launch]] = [[] for _ in range(BRANCHES)]
    chains = _chains(shapes, size)
    for number, chain in enumerate(chains):
        branches[number % BRANCHES] += [_launch(tile, jobs, size, device) for tile, jobs in chain]
    return tuple(tuple(branch) for branch in branches if branch)


# Tensors of one tile with their jobs, and the passes over them one after another.
_Jobs = list[tuple[int, ...]]
_Chain = list[tuple[Tile, _Jobs]]


def _chains(shapes: Sequence[Shape], size: int) -> list[_Chain]:
    """Tensors that take the same passes with the same tiles, in chunks where there are two."""
    alike: dict[tuple[Tile | None, Tile | None], list[int]] = {}
    for place, shape in enumerate(shapes):
        columns = tile_of(shape, "columns", size) if shape.col_start is not None else None
        rows = tile_of(shape, "rows", size) if shape.row_start is not None else None
        alike.setdefault((columns, rows), []).append(place)
    chains: list[_Chain] = []
    for tiles, places in alike.items():
        both = None not in tiles
        sizes = [shapes[place].rows * shapes[place].cols * size for place in places]
        for chunk in _chunks(places, sizes, CHUNK_BYTES if both else sum(sizes)):
            jobs = {
                "columns": [_job(place, shapes[place], shapes[place].col_start) for place in chunk],
                "rows": [_job(place, shapes[place], shapes[place].row_start) for place in chunk],
            }
            chains.append([(tile, jobs[tile.moving]) for tile in tiles if tile is not None])
    return chains


def _job(place: int, shape: Shape, start: int | None) -> tuple[int, ...]:
    return place, shape.rows, shape.cols, -1 if start is None else start


def _chunks(places: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut so that a chunk holds at most so many bytes, or one tensor."""
    chunks: list[list[int]] = []
    room = 0
    for place, nbytes in zip(places, sizes, strict=True):
        if nbytes > room or not chunks:
            chunks.append([])
            room = most
        chunks[-1].append(place)
        room -= nbytes
    return chunks


def tile_of(shape: Shape, moving: Pass, size: int) -> Tile:
    """The region one program moves: whole along the moving axis, powers of two along both."""
    whole = 1 << ((shape.cols if moving == "columns" else shape.rows) - 1).bit_length()
    across = PROGRAM_BYTES[moving] // whole
    if moving == "columns":
        alignment = math.gcd(shape.cols * size, _VECTOR_BYTES)
        return Tile(moving=moving, rows=max(across // size, 1), cols=whole, alignment=alignment)
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
