"""Which launches move a set of tensors, and which part of which tensor each program takes.

Worked out once per spec: nothing here depends on addresses or draws.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

_WIDEST_SLAB_BYTES = 512
_SECTOR_BYTES = 32
_VECTOR_BYTES = 16
_MOST_BYTES = 128 << 10

Pass = Literal["columns", "rows"]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What one program holds, in bytes, and how much of it a warp.

    Columns: short rows share a program, which is small, so that many run at once. Rows: all that
    registers take at most, and a sector of memory wide at least, if that fits. `lag_bytes`: how
    far the columns of tensors that move both ways are ahead of their rows, few enough that the
    rows are still in the cache; None to move all columns before all rows.
    """

    column_bytes: int = 8 << 10
    column_bytes_per_warp: int = 2 << 10
    row_bytes: int = 128 << 10
    row_bytes_per_warp: int = 8 << 10
    lag_bytes: int | None = None


TUNING = Tuning()


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

    def pieces(self, shape: Shape) -> int:
        """How many programs a tensor of this shape takes."""
        whole, block = (
            (shape.rows, self.rows) if self.moving == "columns" else (shape.cols, self.cols)
        )
        return -(-whole // block)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pass over one tensor, as the kernels read it.

    Programs from `first` on do it. In a launch of both passes, `counter` is the place of the
    tensor's count of finished columns, and `awaited` how many of them rows wait for; columns,
    which wait for nothing, have -1.
    """

    place: int
    rows: int
    cols: int
    start: int
    first: int = 0
    counter: int = 0
    awaited: int = -1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One pass over all tensors that share a tile, or both passes over those that share two.

    With two, `counters` holds the number of pieces taken and each tensor's finished columns.
    """

    tiles: tuple[Tile, ...]
    warps: int
    jobs: torch.Tensor
    programs: torch.Tensor
    counters: torch.Tensor


def build_launches(shapes: Sequence[Shape], size: int, device: torch.device) -> tuple[Launch, ...]:
    """Columns first, then rows: the passes commute, and a tensor may need either or both."""
    together: dict[tuple[Tile, ...], list[tuple[int, Shape]]] = {}
    columns: dict[Tile, list[tuple[Job, int]]] = {}
    rows: dict[Tile, list[tuple[Job, int]]] = {}
    for place, shape in enumerate(shapes):
        if TUNING.lag_bytes and shape.row_start is not None and shape.col_start is not None:
            together.setdefault(tiles_of_both(shape, size), []).append((place, shape))
            continue
        if shape.col_start is not None:
            tile = tile_of(shape, "columns", size)
            columns.setdefault(tile, []).append(_job(place, shape, tile))
        if shape.row_start is not None:
            tile = tile_of(shape, "rows", size)
            rows.setdefault(tile, []).append(_job(place, shape, tile))
    return (
        *(_launch((tile,), jobs, size, device) for tile, jobs in columns.items()),
        *(_launch((tile,), jobs, size, device) for tile, jobs in rows.items()),
        *(
            _launch(tiles, _in_turns(tiles, found, size), size, device)
            for tiles, found in together.items()
        ),
    )


def tile_of(shape: Shape, moving: Pass, size: int, column_bytes: int | None = None) -> Tile:
    """The region one program moves: whole along the moving axis, powers of two along both."""
    whole = 1 << ((shape.cols if moving == "columns" else shape.rows) - 1).bit_length()
    if moving == "columns":
        across = (column_bytes or TUNING.column_bytes) // whole
        return Tile(moving=moving, rows=max(across // size, 1), cols=whole, alignment=size)
    across = max(TUNING.row_bytes // whole, min(_SECTOR_BYTES, _MOST_BYTES // whole))
    cols = max(min(across, _WIDEST_SLAB_BYTES) // size, 1)
    alignment = math.gcd(shape.cols * size, cols * size, _VECTOR_BYTES)
    return Tile(moving=moving, rows=whole, cols=cols, alignment=alignment)


def tiles_of_both(shape: Shape, size: int) -> tuple[Tile, Tile]:
    """The tiles of both passes, in programs of as many warps as rows need."""
    rows = tile_of(shape, "rows", size)
    column_bytes = num_warps(rows, size) * TUNING.column_bytes_per_warp
    return tile_of(shape, "columns", size, column_bytes), rows


def num_warps(tile: Tile, size: int) -> int:
    """Warps for a tile; an element takes a register of 4 bytes even if it is smaller."""
    held = tile.rows * tile.cols * max(size, 4)
    columns = tile.moving == "columns"
    share = TUNING.column_bytes_per_warp if columns else TUNING.row_bytes_per_warp
    return min(max(held // share, 4), 32)


def _job(place: int, shape: Shape, tile: Tile, **waiting: int) -> tuple[Job, int]:
    """The job of one pass, and how many programs it takes."""
    start = shape.col_start if tile.moving == "columns" else shape.row_start
    assert start is not None, "a pass is planned along an axis that moves"
    job = Job(place=place, rows=shape.rows, cols=shape.cols, start=start, **waiting)
    return job, tile.pieces(shape)


def _in_turns(
    tiles: tuple[Tile, ...], found: list[tuple[int, Shape]], size: int
) -> list[tuple[Job, int]]:
    """Jobs of both passes, a tensor's rows some bytes of other columns after its columns."""
    columns, rows = tiles
    lag = TUNING.lag_bytes or 0
    jobs: list[tuple[Job, int]] = []
    behind: deque[tuple[int, tuple[Job, int]]] = deque()
    issued = 0
    for counter, (place, shape) in enumerate(found, start=1):
        jobs.append(_job(place, shape, columns, counter=counter))
        issued += shape.rows * shape.cols * size
        awaited = columns.pieces(shape)
        behind.append((issued, _job(place, shape, rows, counter=counter, awaited=awaited)))
        while issued - behind[0][0] >= lag:
            jobs.append(behind.popleft()[1])
    return jobs + [job for _, job in behind]


def _launch(
    tiles: tuple[Tile, ...], jobs: list[tuple[Job, int]], size: int, device: torch.device
) -> Launch:
    table = torch.tensor([[*vars(job).values()] for job, _ in jobs])
    programs = torch.tensor([pieces for _, pieces in jobs])
    table[:, 4] = programs.cumsum(0) - programs
    owners = torch.arange(len(jobs), dtype=torch.int32).repeat_interleave(programs)
    counters = 1 + max(job.counter for job, _ in jobs)
    return Launch(
        tiles=tiles,
        warps=num_warps(tiles[-1], size),
        jobs=table.to(device),
        programs=owners.to(device),
        counters=torch.zeros(counters, dtype=torch.int32, device=device),
    )
