"""Moves all tensors of a model with few launches, where Triton and a GPU are at hand.

A launch per tensor and axis would cost more than the data it moves. Here one launch moves the
columns of many tensors of similar row length, another the rows of many tensors with a similar
number of them. All work in place. What to launch is worked out once per spec; a step then looks up
addresses and replays the launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shuffled_dpsgd.permutation.move.drawing import Permutation
from shuffled_dpsgd.permutation.move.index_layout import packing_of
from shuffled_dpsgd.permutation.move.kernel_route import find_kernels, kernels
from shuffled_dpsgd.permutation.move.launches import Launch, MatrixShape, build_branches, tile_of
from shuffled_dpsgd.permutation.move.recording import Recording
from shuffled_dpsgd.permutation.spec import PermutationSpec

_VECTOR_BYTES = 16
_LONGEST_AXIS = 16384
_ELEMENT_SIZES = (1, 2, 4, 8)
# Every GPU that Triton serves has as much shared memory for a row whose columns move.
_SHARED_BYTES = 64 << 10


def can_move(spec: PermutationSpec, name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernels can move a tensor shaped like the named parameter.

    A subclass may hold its data elsewhere or in parts; its address would mean nothing.
    """
    shape = matrix_shape(spec, name)
    return (
        tensor.is_cuda
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.element_size() in _ELEMENT_SIZES
        and shape is not None
        and fits_shared_memory(shape, tensor.element_size())
        and find_kernels(tensor.device) is not None
    )


def fits_shared_memory(shape: MatrixShape, size: int) -> bool:
    """Whether a program can hold a whole row of elements of `size` bytes, if columns move."""
    return shape.col_start is None or tile_of(shape, "columns", size).cols * size <= _SHARED_BYTES


def matrix_shape(spec: PermutationSpec, name: str) -> MatrixShape | None:
    """How the kernels see a parameter; None if it moves along axes they do not serve."""
    cache: dict[str, MatrixShape | None] = spec.derived["matrix shape"]
    if name not in cache:
        starts = packing_of(spec, torch.device("cpu")).starts
        axes = {axis: starts[layout] for axis, layout in spec.axes_of[name]}
        cache[name] = _matrix_shape(spec.shapes[name], axes)
    return cache[name]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Tensors of one element size on one device, ready to be moved while their addresses hold.

    The kernels read their indices from `packed`.
    """

    branches: tuple[tuple[Launch, ...], ...]
    pointers: torch.Tensor
    packed: torch.Tensor
    element_size: int
    aligned: bool

    @cached_property
    def recording(self) -> Recording:
        """The launches, issued together."""
        issue = functools.partial(
            issue_launches,
            self.branches,
            self.pointers,
            self.packed,
            size=self.element_size,
            aligned=self.aligned,
        )
        return Recording(issue, self.pointers.device)


def prepare(spec: PermutationSpec, moving: Sequence[tuple[str, torch.Tensor]]) -> Prepared:
    """Look up the launches for tensors of one element size and device; send their addresses."""
    device = moving[0][1].device
    size = moving[0][1].element_size()
    pointers = torch.tensor([tensor.data_ptr() for _, tensor in moving])
    aligned = bool((pointers % _VECTOR_BYTES == 0).all())
    if device.type == "cuda":
        pointers = pointers.pin_memory().to(device, non_blocking=True)
    return Prepared(
        branches=branches_for(spec, tuple(name for name, _ in moving), size, device),
        pointers=pointers,
        packed=torch.empty(
            packing_of(spec, torch.device("cpu")).length, dtype=torch.int32, device=device
        ),
        element_size=size,
        aligned=aligned,
    )


def move(permutation: Permutation, prepared: Prepared) -> None:
    """Permute the tensors in place."""
    prepared.packed.copy_(permutation.packed)
    prepared.recording.run()


def issue_launches(
    branches: tuple[tuple[Launch, ...], ...],
    pointers: torch.Tensor,
    packed: torch.Tensor,
    *,
    size: int,
    aligned: bool,
) -> None:
    """Move the tensors at `pointers` as `packed` says, all branches at the same time."""
    if pointers.device.type != "cuda":
        for branch in branches:
            _issue(branch, pointers, packed, size=size, aligned=aligned)
        return
    main = torch.cuda.current_stream(pointers.device)
    sides = []
    for branch in branches[1:]:
        side = torch.cuda.Stream(pointers.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _issue(branch, pointers, packed, size=size, aligned=aligned)
        sides.append(side)
    _issue(branches[0], pointers, packed, size=size, aligned=aligned)
    for side in sides:
        main.wait_stream(side)


def _issue(
    launches: tuple[Launch, ...],
    pointers: torch.Tensor,
    packed: torch.Tensor,
    *,
    size: int,
    aligned: bool,
) -> None:
    code = kernels()
    for launch in launches:
        tile = launch.tile
        kernel = code.permute_columns if tile.moving == "columns" else code.permute_rows
        kernel[(launch.programs.shape[0],)](
            pointers,
            launch.jobs,
            launch.programs,
            packed,
            ELEMENT=code.ELEMENT[size],
            FIELDS=code.JOB_FIELDS,
            ROWS=tile.rows,
            COLS=tile.cols,
            SIZE=size,
            ALIGNMENT=tile.alignment if aligned else size,
            num_warps=launch.warps,
        )


def branches_for(
    spec: PermutationSpec, names: tuple[str, ...], size: int, device: torch.device
) -> tuple[tuple[Launch, ...], ...]:
    """The launches for these tensors, made once: they do not depend on addresses or draws."""
    cache: dict[object, tuple[tuple[Launch, ...], ...]] = spec.derived["launches"]
    key = (names, size, device)
    if key not in cache:
        shapes = [matrix_shape(spec, name) for name in names]
        moving = [shape for shape in shapes if shape is not None]
        cache[key] = build_branches(moving, size, device, _cache_bytes(device))
    return cache[key]


def _cache_bytes(device: torch.device) -> int:
    """The size of the L2 cache; Triton's interpreter has none."""
    if device.type != "cuda":
        return 1 << 20
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _matrix_shape(shape: tuple[int, ...], axes: dict[int, int]) -> MatrixShape | None:
    last = len(shape) - 1
    elements = math.prod(shape)
    if any(shape[axis] > _LONGEST_AXIS for axis in axes):
        return None
    if set(axes) == {last}:
        return MatrixShape(
            rows=elements // shape[last], cols=shape[last], row_start=None, col_start=axes[last]
        )
    if set(axes) == {0} or (set(axes) == {0, last} and last == 1):
        return MatrixShape(
            rows=shape[0],
            cols=elements // shape[0],
            row_start=axes[0],
            col_start=axes.get(last),
        )
    return None
