"""Move large tensors in main memory on threads of our own, a piece in cache at a time.

torch gathers along a last axis on one thread however many it has. What it does on several, it does
on threads that wait for each other after every operation, and when another process takes one of the
cores that waiting costs many times the work. Here every worker moves tensors of its own, by
operations that stay on one thread: numpy's, and torch's gather along a last axis.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

OnAxis = tuple[int, torch.Tensor]
Placed = tuple[torch.Tensor, Sequence[OnAxis]]
Rows = npt.NDArray[np.int64]
Buffers = tuple[torch.Tensor, torch.Tensor]

# About the second-level cache of a core; smaller blocks would spend their time between operations.
_BLOCK_BYTES = 1 << 20
# Two rows of a block may have to be set aside, so blocks of few rows would need more memory.
_FEWEST_ROWS = 64
# Fewer elements than these are moved before the threads have started.
_SMALL_MODEL = 1 << 22

# Bits are moved as if they were of these dtypes: numpy has no bfloat16.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.float32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A tensor's memory as rows, with the orders that they and the entries of each shall have."""

    values: torch.Tensor
    rows: torch.Tensor | None
    columns: torch.Tensor | None

    @property
    def block_rows(self) -> int:
        row_bytes = self.values.shape[1] * self.values.element_size()
        return max(_FEWEST_ROWS, _BLOCK_BYTES // row_bytes)

    @property
    def block_elements(self) -> int:
        return min(self.block_rows, self.values.shape[0]) * self.values.shape[1]

    @property
    def extra_elements(self) -> int:
        """What moving needs beside the matrix: two blocks, and two rows set aside per block."""
        num_rows, width = self.values.shape
        return 2 * self.block_elements + 2 * width * -(-num_rows // self.block_rows)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Rows that move together: row `target[k]` takes what row `source[k]` held.

    At the places `holes`, that was set aside before anything moved, as entries `aside` of it.
    """

    target: Rows
    source: Rows
    holes: Rows
    aside: slice


@dataclass(frozen=True, kw_only=True)
class _Route:
    """In which order the rows of a matrix move, and which of them must be set aside.

    The order follows the cycles of the permutation, where each row takes what the next one held.
    So a block of consecutive rows takes them from itself, but for the one after its last, and for
    the first of a cycle that began in an earlier block: at most two are set aside per block.
    """

    blocks: tuple[_Block, ...]
    set_aside: Rows


def move(placed: Sequence[Placed]) -> list[Placed]:
    """Move all tensors it pays to move on several threads; return the others, untouched.

    All have one dtype and lie in main memory. An interrupt of the caller is raised before any or
    after all of them have moved, and what a worker raises is raised here. The memory needed is at
    most that of the largest tensor.
    """
    num_threads = torch.get_num_threads()
    if num_threads < 2:
        return list(placed)
    taken: list[Placed] = []
    left: list[Placed] = []
    for pair in placed:
        (taken if _suits(*pair) else left).append(pair)
    if sum(tensor.numel() for tensor, _ in taken) < _SMALL_MODEL:
        return list(placed)
    matrices = [_as_matrix(*pair) for pair in taken]
    largest = max(matrix.values.numel() for matrix in matrices)
    most = max(matrix.extra_elements for matrix in matrices)
    num_workers = min(num_threads, largest // most)
    if num_workers < 2:
        return list(placed)
    for tensor, _ in taken:
        # Writes through numpy are not seen by autograd, which must refuse a backward over them.
        torch.autograd.graph.increment_version(tensor)
    _share_out(matrices, num_workers)
    return left


def _suits(tensor: torch.Tensor, axes: Sequence[OnAxis]) -> bool:
    """Whether the tensor is plain memory, row by row, that moves along its outer axes only."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.numel() > 0
        and {axis for axis, _ in axes} <= {0, tensor.ndim - 1}
        and tensor.is_contiguous()
        and tensor.element_size() in _CARRIERS
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _as_matrix(tensor: torch.Tensor, axes: Sequence[OnAxis]) -> _Matrix:
    order = dict(axes)
    columns = order.pop(tensor.ndim - 1, None)
    rows = order.get(0)
    values = tensor.detach().view(_CARRIERS[tensor.element_size()])
    shape = (-1, tensor.shape[-1]) if rows is None else (tensor.shape[0], -1)
    return _Matrix(values=values.view(shape), rows=rows, columns=columns)


def _share_out(matrices: Sequence[_Matrix], num_workers: int) -> None:
    route_of = functools.cache(_find_route)
    pieces: list[tuple[int, Callable[[Buffers], None]]] = []
    for matrix in matrices:
        if matrix.rows is not None:
            task = functools.partial(_move_rows, matrix, route_of)
            pieces.append((matrix.values.numel(), task))
        else:
            for block in matrix.values.split(matrix.block_rows):
                pieces.append((block.numel(), functools.partial(_move_columns, matrix, block)))
    # The largest first: the small ones at the end let all workers finish at about the same time.
    pieces.sort(key=lambda piece: piece[0], reverse=True)
    ordered = [task for _, task in pieces]
    tasks: deque[Callable[[Buffers], None]] = deque()
    gate = threading.Lock()
    block_elements = max(matrix.block_elements for matrix in matrices)
    dtype = matrices[0].values.dtype

    def work() -> None:
        first, second = torch.empty(2, block_elements, dtype=dtype, device="cpu")
        with gate:
            pass
        while True:
            try:
                task = tasks.popleft()
            except IndexError:
                return
            task((first, second))

    # An interrupt while the workers start finds nothing moved: they have no tasks before all are
    # there. One that comes later finds all moved: leaving the pool waits for the workers.
    with ThreadPoolExecutor(num_workers) as pool:
        with gate:
            running = [pool.submit(work) for _ in range(num_workers)]
            tasks.extend(ordered)
        for worker in running:
            worker.result()


def _move_columns(matrix: _Matrix, block: torch.Tensor, buffers: Buffers) -> None:
    copied = buffers[0][: block.numel()].view(block.shape)
    np.copyto(copied.numpy(), block.numpy())
    _gather_columns(matrix, copied, block)


def _gather_columns(matrix: _Matrix, block: torch.Tensor, out: torch.Tensor) -> None:
    assert matrix.columns is not None
    shape = (-1, len(matrix.columns))
    block, out = block.view(shape), out.view(shape)
    if block.dtype == torch.float32:
        torch.index_select(block, 1, matrix.columns, out=out)
    else:
        # Of other dtypes torch gathers at a seventh of the speed, numpy at half.
        index = matrix.columns.numpy()
        np.take(block.numpy(), index, axis=1, out=out.numpy(), mode="clip")


def _move_rows(
    matrix: _Matrix, route_of: Callable[[torch.Tensor, int], _Route], buffers: Buffers
) -> None:
    """Move rows, and columns if they move, in place: each entry is read once and written once."""
    assert matrix.rows is not None
    width = matrix.values.shape[1]
    values = matrix.values.numpy()
    route = route_of(matrix.rows, matrix.block_rows)
    aside = values[route.set_aside]
    for block in route.blocks:
        taken, gathered = (b[: len(block.target) * width].view(-1, width) for b in buffers)
        rows = taken.numpy()
        np.take(values, block.source, axis=0, out=rows, mode="clip")
        rows[block.holes] = aside[block.aside]
        if matrix.columns is not None:
            _gather_columns(matrix, taken, gathered)
            rows = gathered.numpy()
        values[block.target] = rows


def _find_route(index: torch.Tensor, size: int) -> _Route:
    target = _by_cycles(index.tolist())
    source = index.numpy()[target]
    block_of = np.empty_like(target)
    block_of[target] = np.arange(len(target)) // size
    outside = np.flatnonzero(block_of[source] != block_of[target])
    blocks = []
    for begin in range(0, len(target), size):
        end = begin + size
        low, high = np.searchsorted(outside, (begin, end))
        blocks.append(
            _Block(
                target=target[begin:end],
                source=source[begin:end],
                holes=outside[low:high] - begin,
                aside=slice(low, high),
            )
        )
    return _Route(blocks=tuple(blocks), set_aside=source[outside])


def _by_cycles(following: list[int]) -> Rows:
    """All rows, cycle by cycle, each but a cycle's last before the row that follows it."""
    seen = bytearray(len(following))
    order: list[int] = []
    for start in range(len(following)):
        row = start
        while not seen[row]:
            seen[row] = 1
            order.append(row)
            row = following[row]
    return np.array(order, dtype=np.int64)
