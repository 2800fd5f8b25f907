"""Moves all tensors of a model with a few launches, where Triton and a GPU are at hand.

A launch per tensor and axis would cost more than the data it moves. Here one launch moves the
columns of all tensors of similar row length, another the rows of all tensors with a similar number
of them. Both work in place. What to launch is worked out once per spec; a step then looks up
addresses and launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shuffled_dpsgd.permutation.backend import triton_kernels
from shuffled_dpsgd.permutation.draw import Permutation, packing_of
from shuffled_dpsgd.permutation.spec import PermutationSpec

# What one program holds. Columns: short rows share a program, which is small, so that many run at
# once. Rows: all that registers take, for the widest slab is the best use of memory.
PROGRAM_BYTES = {"columns": 8 << 10, "rows": 128 << 10}
_BYTES_PER_WARP = {"columns": 2 << 10, "rows": 8 << 10}
_WIDEST_SLAB_BYTES = 512
_VECTOR_BYTES = 16
_LONGEST_AXIS = 16384
_ELEMENT_SIZES = (1, 2, 4, 8)

Pass = Literal["columns", "rows"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tensor seen as a matrix, with the layouts that index its rows and columns."""

    rows: int
    cols: int
    row_layout: int | None
    col_layout: int | None


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
    jobs: torch.Tensor
    programs: torch.Tensor


def can_move(spec: PermutationSpec, name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernels can move a tensor shaped like the named parameter.

    A subclass may hold its data elsewhere or in parts; its address would mean nothing.
    """
    return (
        tensor.is_cuda
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.element_size() in _ELEMENT_SIZES
        and triton_kernels() is not None
        and matrix_shape(spec, name) is not None
    )


def matrix_shape(spec: PermutationSpec, name: str) -> Shape | None:
    """How the kernels see a parameter; None if it moves along axes they do not serve."""
    cache: dict[str, Shape | None] = spec.derived["matrix shape"]
    if name not in cache:
        cache[name] = _matrix_shape(spec.shapes[name], dict(spec.axes_of[name]))
    return cache[name]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Tensors of one element size on one device, ready to be moved while their addresses hold."""

    launches: tuple[Launch, ...]
    pointers: torch.Tensor
    element_size: int
    aligned: bool


def prepare(spec: PermutationSpec, moving: Sequence[tuple[str, torch.Tensor]]) -> Prepared:
    """Look up the launches for tensors of one element size and device; send their addresses."""
    device = moving[0][1].device
    size = moving[0][1].element_size()
    pointers = torch.tensor([tensor.data_ptr() for _, tensor in moving])
    aligned = bool((pointers % _VECTOR_BYTES == 0).all())
    if device.type == "cuda":
        pointers = pointers.pin_memory().to(device, non_blocking=True)
    return Prepared(
        launches=launches(spec, tuple(name for name, _ in moving), size, device),
        pointers=pointers,
        element_size=size,
        aligned=aligned,
    )


def move(permutation: Permutation, prepared: Prepared) -> None:
    """Permute the tensors in place."""
    code = triton_kernels()
    assert code is not None
    pointers, size = prepared.pointers, prepared.element_size
    packed = permutation.to(pointers.device).packed.to(torch.int32)
    with torch.cuda.device_of(pointers):
        for launch in prepared.launches:
            tile = launch.tile
            grid = (launch.programs.shape[0],)
            tables = (pointers, launch.jobs, launch.programs, packed)
            constants = {
                "ELEMENT": code.ELEMENT[size],
                "FIELDS": code.JOB_FIELDS,
                "ROWS": tile.rows,
                "COLS": tile.cols,
                "num_warps": num_warps(tile, size),
            }
            if tile.moving == "columns":
                code.permute_columns[grid](*tables, **constants)
            else:
                alignment = tile.alignment if prepared.aligned else size
                code.permute_rows[grid](*tables, **constants, SIZE=size, ALIGNMENT=alignment)


def num_warps(tile: Tile, size: int) -> int:
    """Warps for a tile; an element takes a register of 4 bytes even if it is smaller."""
    held = tile.rows * tile.cols * max(size, 4)
    return min(max(held // _BYTES_PER_WARP[tile.moving], 4), 32)


def _matrix_shape(shape: tuple[int, ...], axes: dict[int, int]) -> Shape | None:
    last = len(shape) - 1
    elements = math.prod(shape)
    if any(shape[axis] > _LONGEST_AXIS for axis in axes):
        return None
    if set(axes) == {last}:
        return Shape(
            rows=elements // shape[last], cols=shape[last], row_layout=None, col_layout=axes[last]
        )
    if set(axes) == {0} or (set(axes) == {0, last} and last == 1):
        return Shape(
            rows=shape[0],
            cols=elements // shape[0],
            row_layout=axes[0],
            col_layout=axes.get(last),
        )
    return None


def launches(
    spec: PermutationSpec, names: tuple[str, ...], size: int, device: torch.device
) -> tuple[Launch, ...]:
    """The launches for these tensors, made once: they do not depend on addresses or draws."""
    cache: dict[object, tuple[Launch, ...]] = spec.derived["launches"]
    key = (names, size, device)
    if key not in cache:
        shapes = [matrix_shape(spec, name) for name in names]
        starts = packing_of(spec, torch.device("cpu")).starts
        cache[key] = _build_launches([s for s in shapes if s is not None], starts, size, device)
    return cache[key]


def _build_launches(
    shapes: Sequence[Shape], starts: Sequence[int], size: int, device: torch.device
) -> tuple[Launch, ...]:
    """Columns first, then rows: the passes commute, and a tensor may need either or both."""
    found: list[Launch] = []
    for moving in ("columns", "rows"):
        by_tile: dict[Tile, list[tuple[int, ...]]] = {}
        for place, shape in enumerate(shapes):
            layout = shape.col_layout if moving == "columns" else shape.row_layout
            if layout is not None:
                job = (place, shape.rows, shape.cols, starts[layout])
                by_tile.setdefault(tile_of(shape, moving, size), []).append(job)
        found += [_launch(tile, jobs, device) for tile, jobs in by_tile.items()]
    return tuple(found)


def tile_of(shape: Shape, moving: Pass, size: int) -> Tile:
    """The region one program moves: whole along the moving axis, powers of two along both."""
    whole = 1 << ((shape.cols if moving == "columns" else shape.rows) - 1).bit_length()
    across = PROGRAM_BYTES[moving] // whole
    if moving == "columns":
        return Tile(moving=moving, rows=max(across // size, 1), cols=whole, alignment=size)
    cols = max(min(across, _WIDEST_SLAB_BYTES) // size, 1)
    alignment = math.gcd(shape.cols * size, cols * size, _VECTOR_BYTES)
    return Tile(moving=moving, rows=whole, cols=cols, alignment=alignment)


def _launch(tile: Tile, jobs: list[tuple[int, ...]], device: torch.device) -> Launch:
    fields = torch.tensor(jobs)
    rows, cols = fields[:, 1], fields[:, 2]
    whole, block = (rows, tile.rows) if tile.moving == "columns" else (cols, tile.cols)
    programs = (whole + block - 1) // block
    first = programs.cumsum(0) - programs
    owners = torch.arange(len(jobs), dtype=torch.int32).repeat_interleave(programs)
    return Launch(
        tile=tile,
        jobs=torch.cat([fields, first[:, None]], dim=1).to(device),
        programs=owners.to(device),
    )
