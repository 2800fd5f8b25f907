"""Tables of addresses, through which one launch finds the tensors of many layers.

Captured activations are not copied: only their addresses are sent to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

Rows = tuple[tuple[int, ...], ...]


def address_table(columns: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors' addresses, one table per column of tensors."""
    rows = tuple(tuple([tensor.data_ptr() for tensor in column]) for column in columns)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent(rows, device, stream)


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
