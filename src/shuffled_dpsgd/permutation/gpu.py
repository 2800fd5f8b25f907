"""Moves all tensors of a model with few launches, where Triton and a GPU are at hand.

A launch per tensor and axis would cost more than the data it moves. Here one launch moves the
columns of many tensors of similar row length, another the rows of many tensors with a similar
number of them. Both work in place. What to launch depends on shapes alone and is kept; addresses
are sent with every move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Literal

import torch

from shuffled_dpsgd.permutation.drawing import Permutation, draw
from shuffled_dpsgd.permutation.spec import Group, Member, PermutationSpec
from shuffled_dpsgd.runtime.backends import Backend, expect, triton_available

# Bytes that one program holds, and bytes for each of its warps. Columns: programs are small, so
# that many run at once, and short rows share one. Rows: half of what the registers can hold, but
# at least one sector of memory wide where the registers allow it.
PROGRAM_BYTES = {"columns": 8 << 10, "rows": 64 << 10}
BYTES_PER_WARP = {"columns": 2 << 10, "rows": 8 << 10}
_MOST_BYTES = 128 << 10
_SECTOR_BYTES = 32
_WIDEST_SLAB_BYTES = 512
_VECTOR_BYTES = 16
_LONGEST_AXIS = 16384
_ELEMENT_SIZES = (1, 2, 4, 8)
# Every GPU that Triton serves has as much shared memory for a row whose columns move.
_SHARED_BYTES = 64 << 10

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
    """One pass over all tensors that share a tile; each program is given its job."""

    tile: Tile
    warps: int
    jobs: torch.Tensor
    programs: torch.Tensor


def can_move(spec: PermutationSpec, name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernels serve the tensor; the address of a subclass would mean nothing."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    shape, size = matrix_shapes(spec)[name], tensor.element_size()
    return (
        tensor.layout == torch.strided
        and tensor.is_contiguous()
        and size in _ELEMENT_SIZES
        and shape is not None
        and fits_shared_memory(shape, size)
        and triton_available()
        and BACKEND.serves(tensor.device)
    )


def fits_shared_memory(shape: MatrixShape, size: int) -> bool:
    """Whether a program can hold a whole row of elements of `size` bytes, if columns move."""
    return shape.col_start is None or _tile_of(shape, "columns", size).cols * size <= _SHARED_BYTES


def matrix_shapes(spec: PermutationSpec) -> dict[str, MatrixShape | None]:
    """How the kernels see every parameter; None if it moves along axes they do not serve."""
    found: dict[str, MatrixShape | None] = spec.derived["matrix shapes"]
    if not found:
        starts = [0, *accumulate(layout.size for layout in spec.layouts)]
        for name, moving in spec.axes_of.items():
            axes = {axis: starts[layout] for axis, layout in moving}
            found[name] = _matrix_shape(spec.shapes[name], axes)
    return found


def _matrix_shape(shape: tuple[int, ...], axes: dict[int, int]) -> MatrixShape | None:
    last = len(shape) - 1
    if any(shape[axis] > _LONGEST_AXIS for axis in axes):
        return None
    if set(axes) == {last}:
        rows = math.prod(shape[:last])
        return MatrixShape(rows=rows, cols=shape[last], row_start=None, col_start=axes[last])
    if set(axes) == {0} or (set(axes) == {0, last} and last == 1):
        cols = math.prod(shape[1:])
        return MatrixShape(rows=shape[0], cols=cols, row_start=axes[0], col_start=axes.get(last))
    return None


def move(permutation: Permutation, moving: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Permute tensors in place, all of one element size and on the permutation's device."""
    device, size = permutation.packed.device, moving[0][1].element_size()
    addresses = torch.tensor([tensor.data_ptr() for _, tensor in moving])
    aligned = bool((addresses % _VECTOR_BYTES == 0).all())
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    kept = permutation.spec.derived["launches"]
    key = device, size, tuple(name for name, _ in moving)
    if key not in kept:
        shapes = matrix_shapes(permutation.spec)
        kept[key] = build_launches([shapes[name] for name, _ in moving], size, device)
    code = kernels()
    for launch in kept[key]:
        tile = launch.tile
        kernel = code.permute_columns if tile.moving == "columns" else code.permute_rows
        kernel[(launch.programs.shape[0],)](
            addresses,
            launch.jobs,
            launch.programs,
            permutation.packed,
            ELEMENT=code.ELEMENT[size],
            FIELDS=code.JOB_FIELDS,
            ROWS=tile.rows,
            COLS=tile.cols,
            SIZE=size,
            ALIGNMENT=tile.alignment if aligned else size,
            num_warps=launch.warps,
        )


def kernels() -> ModuleType:
    """The Triton kernels, imported when first asked for."""
    return import_module("shuffled_dpsgd.permutation.triton_kernels")


def build_launches(
    shapes: Sequence[MatrixShape | None], size: int, device: torch.device
) -> tuple[Launch, ...]:
    """A pass over columns, then one over rows; the two commute. One launch for each tile."""
    passes: tuple[Pass, Pass] = ("columns", "rows")
    alike: dict[Tile, list[tuple[int, ...]]] = {}
    for moving in passes:
        for place, shape in enumerate(shapes):
            if shape is None:
                raise AssertionError(f"tensor {place} is none the kernels serve")
            start = shape.col_start if moving == "columns" else shape.row_start
            if start is not None:
                job = place, shape.rows, shape.cols, start
                alike.setdefault(_tile_of(shape, moving, size), []).append(job)
    return tuple(_launch(tile, jobs, size, device) for tile, jobs in alike.items())


def _tile_of(shape: MatrixShape, moving: Pass, size: int) -> Tile:
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


def _num_warps(tile: Tile, size: int) -> int:
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
        warps=_num_warps(tile, size),
        jobs=torch.cat([fields, first[:, None]], dim=1).to(device),
        programs=owners.to(device),
    )


def small_spec(rows: int, cols: int) -> PermutationSpec:
    """Two matrices, one shaped as the other's transpose, that move along both axes."""
    up, down = "up", "down"
    groups = [
        Group(
            name=f"axis {axis}",
            kind="mlp-hidden",
            size=size,
            members=(Member(parameter=up, axis=axis), Member(parameter=down, axis=1 - axis)),
        )
        for axis, size in enumerate((rows, cols))
    ]
    shapes = {up: (rows, cols), down: (cols, rows)}
    return PermutationSpec(scope="full", groups=tuple(groups), shapes=shapes, unmoved={})


def probe_kernels(device: torch.device) -> None:
    """Move two small matrices, bit for bit as indexing does."""
    generator = torch.Generator("cpu").manual_seed(0)
    permutation = draw(small_spec(40, 24), generator)
    rows, cols = permutation.index("up", 0), permutation.index("up", 1)
    up = torch.randn(40, 24, generator=generator, device="cpu", dtype=torch.float32)
    moved = up[rows][:, cols]
    tensors = {"up": up.to(device), "down": up.mT.contiguous().to(device)}
    move(permutation.to(device), list(tensors.items()))
    for name, wanted in (("up", moved), ("down", moved.mT)):
        is_moved = torch.equal(tensors[name].cpu(), wanted)
        expect(is_moved, "a matrix is not moved as indexing moves it")


BACKEND = Backend(
    name="Shuffling in Triton",
    instead="Plain indexing serves",
    cost="every tensor takes launches and a temporary of its own",
    probe=probe_kernels,
)
