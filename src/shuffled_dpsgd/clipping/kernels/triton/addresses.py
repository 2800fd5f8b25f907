"""Tables of addresses, through which one launch finds the tensors of many layers.

Captured activations are not copied: only their addresses are sent to the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Rows = tuple[tuple[int, ...], ...]
Tables = dict[Rows, tuple[Tensor, ...]]

_HELD: ContextVar[Tables | None] = ContextVar("_HELD", default=None)


def address_table(columns: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors' addresses, one table per column of tensors."""
    rows = tuple(tuple([tensor.data_ptr() for tensor in column]) for column in columns)
    held = _HELD.get()
    found = None if held is None else held.get(rows)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _written(rows, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _sent(rows, device, stream)
    if held is not None:
        held[rows] = found
    return found


@contextmanager
def holding(tables: Tables) -> Iterator[None]:
    """Keep in `tables` all tables asked for inside, and use those it already has.

    A recorded launch reads its tables again whenever it is replayed, so somebody must hold them.
    """
    token = _HELD.set(tables)
    try:
        yield
    finally:
        _HELD.reset(token)


@functools.lru_cache(maxsize=256)
def _sent(rows: Rows, device: torch.device, stream: int) -> tuple[Tensor, ...]:
    """Numbers sent to a device without waiting for it, for use on one stream.

    The allocator tends to give every step's tensors the addresses of the step before, and sending
    a table takes longer than finding it again.
    """
    # Kernels are compiled apart for tables that do not begin at multiples of 16 bytes.
    table = torch.zeros(len(rows), -(-len(rows[0]) // 2) * 2, dtype=torch.int64)
    table[:, : len(rows[0])] = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table.unbind()


def _written(rows: Rows, device: torch.device) -> tuple[Tensor, ...]:
    """The same table, written by launches: a capture can record these, but no copy from the host.

    Slow, and only for the few tensors that are made during the capture. Those that lie side by
    side in one buffer take a single launch.
    """
    tables = []
    for row in rows:
        step = row[1] - row[0] if len(row) > 1 else 0
        if step and all(b - a == step for a, b in itertools.pairwise(row)):
            end = row[0] + step * len(row)
            tables.append(torch.arange(row[0], end, step, dtype=torch.int64, device=device))
            continue
        table = torch.empty(len(row), dtype=torch.int64, device=device)
        for place, address in zip(table.unbind(), row, strict=True):
            place.fill_(address)
        tables.append(table)
    return tuple(tables)
