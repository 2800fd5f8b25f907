"""Which launches move a set of tensors, and which part of which tensor each program takes.

Worked out once per spec: nothing here depends on addresses or draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

# Bytes that one program holds, and bytes for each of its warps. Columns: programs are small, so
# that many run at once, and short rows share one. Rows: half of what the registers can hold, but
# at least one sector of memory wide where the registers allow it.
PROGRAM_BYTES = {"columns": 8 << 10, "rows": 64 << 10}
BYTES_PER_WARP = {"columns": 2 << 10, "rows": 8 << 10}
_MOST_BYTES = 128 << 10
_SECTOR_BYTES = 32
_WIDEST_SLAB_BYTES = 512
_VECTOR_BYTES = 16
# How many chains of launches run at a time: enough to keep the GPU busy between the passes of one.
# And the part of the L2 cache that their tensors may take together.
BRANCHES = 3
CACHE_SHARE = 0.6

Pass = Literal["columns", "rows"]


@dataclass(frozen=True, kw_only=True)
class MatrixShape:
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


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """Tensors, by their places, that take the same passes one after another."""

    passes: tuple[Tile, ...]
    places: tuple[int, ...]
    nbytes: int


def build_branches(
    shapes: Sequence[MatrixShape], size: int, device: torch.device, cache_bytes: int
) -> tuple[tuple[Launch, ...], ...]:
    """All launches for these tensors; those of one branch must follow one another.

    A tensor may need a pass over its columns, over its rows, or both. The passes commute; columns
    go first. Tensors that need both are read and written twice, so they are taken a few at a time:
    the second pass then finds them in the cache of `cache_bytes`. No tensor is in two branches.
    """
    room = int(CACHE_SHARE * cache_bytes)
    twice, once = _chains(shapes, size, room // BRANCHES)
    largest = max((chain.nbytes for chain in twice), default=1)
    branches: list[list[Launch]] = [[] for _ in range(min(max(room // largest, 1), BRANCHES))]
    load = [0] * len(branches)
    for chain in (*twice, *once):
        shortest = load.index(min(load))
        load[shortest] += chain.nbytes * len(chain.passes)
        for tile in chain.passes:
            jobs = [_job(place, shapes[place], tile.moving) for place in chain.places]
            branches[shortest].append(_launch(tile, jobs, size, device))
    return tuple(tuple(branch) for branch in branches if branch)


def _chains(
    shapes: Sequence[MatrixShape], size: int, most_bytes: int
) -> tuple[list[_Chain], list[_Chain]]:
    """Tensors that share their tiles: those of two passes in chunks, those of one all together."""
    alike: dict[tuple[Tile, ...], list[int]] = {}
    for place, shape in enumerate(shapes):
        columns = [tile_of(shape, "columns", size)] if shape.col_start is not None else []
        rows = [tile_of(shape, "rows", size)] if shape.row_start is not None else []
        alike.setdefault((*columns, *rows), []).append(place)
    twice: list[_Chain] = []
    once: list[_Chain] = []
    for passes, places in alike.items():
        sizes = [shapes[place].rows * shapes[place].cols * size for place in places]
        if len(passes) == 1:
            once.append(_Chain(passes=passes, places=tuple(places), nbytes=sum(sizes)))
            continue
        for first, last in _cuts(sizes, most_bytes):
            nbytes = sum(sizes[first:last])
            twice.append(_Chain(passes=passes, places=tuple(places[first:last]), nbytes=nbytes))
    return twice, once


def _cuts(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Runs of consecutive sizes that add up to no more than `most`, or are single.

    >>> _cuts([3, 3, 3, 9, 1], 6)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    starts: list[int] = []
    room = 0
    for place, nbytes in enumerate(sizes):
        if nbytes > room:
            starts.append(place)
            room = most
        room -= nbytes
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))


def _job(place: int, shape: MatrixShape, moving: Pass) -> tuple[int, ...]:
    start = shape.col_start if moving == "columns" else shape.row_start
    assert start is not None
    return place, shape.rows, shape.cols, start


def tile_of(shape: MatrixShape, moving: Pass, size: int) -> Tile:
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
