"""How much shared memory a GPU has for kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

# Shared memory that a kernel needs beside the buffers of its pipeline, to add up across warps.
_RESERVED_BYTES = 4 << 10


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; that of Hopper for Triton's interpreter."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    usual = properties.shared_memory_per_block
    return int(getattr(properties, "shared_memory_per_block_optin", usual))


def stages_that_fit(wanted: int, stage_bytes: int, device: torch.device) -> int:
    """Stages of a pipeline, at most `wanted`, whose buffers fit into shared memory together."""
    return max(1, min(wanted, (shared_bytes(device) - _RESERVED_BYTES) // stage_bytes))
