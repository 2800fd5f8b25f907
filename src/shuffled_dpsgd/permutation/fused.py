"""Moves all tensors of a model with a few launches, where Triton and a GPU are at hand.

A launch per tensor and axis would cost more than the data it moves. Here tensors that move only
along their rows' entries are done in place, all in one launch per row length; the others pass
through one temporary, as many at a time as it holds.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from shuffled_dpsgd.permutation.draw import Permutation, packing_of
from shuffled_dpsgd.permutation.spec import PermutationSpec

# Data of this size stays in the GPU's cache between gather and copy. The temporary is never larger
# than the largest tensor, and grows beyond this only for a tensor that needs it.
TEMPORARY_BYTES = 32 << 20
# Rows this long fill a program by themselves; shorter ones share it.
_ELEMENTS_PER_PROGRAM = 1024
_LONGEST_ROW = 16384
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def kernels() -> ModuleType | None:
    """The Triton kernels, or None without Triton; SHUFFLED_DPSGD_TRITON=0 says none."""
    if os.environ.get("SHUFFLED_DPSGD_TRITON", "1") == "0":
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from shuffled_dpsgd.permutation import triton_gather

    return triton_gather


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tensor seen as a matrix, with the layouts that index its rows and columns."""

    rows: int
    cols: int
    row_layout: int | None
    col_layout: int | None


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """Jobs of one row length, small enough together for the temporary."""

    in_place: bool
    block_rows: int
    block_cols: int
    programs: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Plan:
    jobs: torch.Tensor
    launches: tuple[_Launch, ...]
    temporary_elements: int


def can_move(spec: PermutationSpec, name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernels can move a tensor shaped like the named parameter."""
    return (
        tensor.is_cuda
        and tensor.is_contiguous()
        and tensor.element_size() in _INTEGERS
        and kernels() is not None
        and matrix_shape(spec, name) is not None
    )


def matrix_shape(spec: PermutationSpec, name: str) -> Shape | None:
    """How the kernels see a parameter; None if it moves along axes they do not serve."""
    cache: dict[str, Shape | None] = spec.derived["matrix shape"]
    if name not in cache:
        cache[name] = _matrix_shape(spec.shapes[name], dict(spec.axes_of[name]))
    return cache[name]


def move(permutation: Permutation, moving: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Permute tensors of one element size on one device, in place."""
    device = moving[0][1].device
    size = moving[0][1].element_size()
    plan = _plan(permutation.spec, tuple(name for name, _ in moving), size, device)
    packed = permutation.to(device).packed
    addresses = torch.tensor([tensor.data_ptr() for _, tensor in moving])
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    temporary = torch.empty(max(plan.temporary_elements, 1), dtype=_INTEGERS[size], device=device)
    code = kernels()
    assert code is not None
    with torch.cuda.device_of(addresses):
        for launch in plan.launches:
            grid = (launch.programs.shape[0],)
            block = {
                "ELEMENT": code.ELEMENT[size],
                "FIELDS": code.JOB_FIELDS,
                "ROWS": launch.block_rows,
                "COLS": launch.block_cols,
                "num_warps": 4 if launch.block_cols <= _ELEMENTS_PER_PROGRAM else 8,
            }
            known = (addresses, plan.jobs, launch.programs)
            if launch.in_place:
                code.permute_columns[grid](*known, packed, **block)
            else:
                code.gather_rows[grid](*known, packed, temporary, **block)
                code.copy_rows[grid](*known, temporary, **block)


def _matrix_shape(shape: tuple[int, ...], axes: dict[int, int]) -> Shape | None:
    last = len(shape) - 1
    elements = math.prod(shape)
    if set(axes) == {last}:
        seen = Shape(
            rows=elements // shape[last], cols=shape[last], row_layout=None, col_layout=axes[last]
        )
    elif set(axes) == {0} or (set(axes) == {0, last} and last == 1):
        seen = Shape(
            rows=shape[0],
            cols=elements // shape[0],
            row_layout=axes[0],
            col_layout=axes.get(last),
        )
    else:
        return None
    return seen if seen.cols <= _LONGEST_ROW else None


def _plan(spec: PermutationSpec, names: tuple[str, ...], size: int, device: torch.device) -> _Plan:
    """The launches for these tensors, made once: they do not depend on addresses or draws."""
    cache: dict[object, _Plan] = spec.derived["launches"]
    key = (names, size, device)
    if key not in cache:
        shapes = [matrix_shape(spec, name) for name in names]
        cache[key] = _build_plan(spec, [s for s in shapes if s is not None], size, device)
    return cache[key]


def _build_plan(
    spec: PermutationSpec, shapes: Sequence[Shape], size: int, device: torch.device
) -> _Plan:
    starts = packing_of(spec, torch.device("cpu")).starts
    largest = max(shape.rows * shape.cols for shape in shapes)
    limit = min(TEMPORARY_BYTES // size, largest)
    fields: list[tuple[int, ...]] = []
    launches: dict[tuple[bool, int, int], list[int]] = {}
    filled: dict[int, list[int]] = {}
    for job, shape in enumerate(shapes):
        width = 1 << (shape.cols - 1).bit_length()
        batch = place = 0
        if shape.row_layout is not None:
            batch, place = _reserve(filled.setdefault(width, [0]), shape.rows * shape.cols, limit)
        launches.setdefault((shape.row_layout is None, width, batch), []).append(job)
        row_start = -1 if shape.row_layout is None else starts[shape.row_layout]
        col_start = -1 if shape.col_layout is None else starts[shape.col_layout]
        fields.append((shape.rows, shape.cols, row_start, col_start, place))
    return _Plan(
        jobs=torch.tensor(fields).to(device),
        launches=tuple(
            _launch(shapes, jobs, in_place=in_place, width=width, device=device)
            for (in_place, width, _), jobs in launches.items()
        ),
        temporary_elements=max(
            (most for batches in filled.values() for most in batches), default=0
        ),
    )


def _reserve(batches: list[int], elements: int, limit: int) -> tuple[int, int]:
    """Place in the temporary for one more tensor: in the last batch, or in a new one."""
    if batches[-1] and batches[-1] + elements > limit:
        batches.append(0)
    place = batches[-1]
    batches[-1] += elements
    return len(batches) - 1, place


def _launch(
    shapes: Sequence[Shape], jobs: list[int], *, in_place: bool, width: int, device: torch.device
) -> _Launch:
    block_rows = max(1, _ELEMENTS_PER_PROGRAM // width)
    programs = [
        torch.stack([torch.full((blocks,), job), torch.arange(blocks)], dim=1)
        for job in jobs
        for blocks in [-(-shapes[job].rows // block_rows)]
    ]
    return _Launch(
        in_place=in_place,
        block_rows=block_rows,
        block_cols=width,
        programs=torch.cat(programs).to(device),
    )
