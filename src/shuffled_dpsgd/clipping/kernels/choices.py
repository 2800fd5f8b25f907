"""Which kernels serve a tensor: by its device, its type, and a probe of the kernels.

Those in Triton serve together or not at all: their norms leave room for what their sums lose.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import trials
from shuffled_dpsgd.clipping.kernels.float32 import allows_tf32
from shuffled_dpsgd.runtime.backends import Backend, triton_available

HALF = (torch.bfloat16, torch.float16)
PACKAGE = "shuffled_dpsgd.clipping.kernels"
# One program reads a pair of blocks of tokens alone, which takes long past this width.
MAX_GRAM_WIDTH = 16384
# Rows that matrix kernels can read in wide words begin at multiples of so many bytes.
ROW_ALIGNMENT_BYTES = 16
# A whole number of the blocks the matrix kernels read.
ROW_ROOM = 128
# Narrower rows are too small a product for matrix units.
MIN_WIDTH = 16

KERNELS = Backend(
    name="Norms and sums of layers in Triton",
    instead="Plain torch operations serve",
    cost="products run in float32, and every layer takes launches of its own: several times slower",
    probe=trials.try_kernels,
)
FLOAT32_PRODUCTS = Backend(
    name="Products of float32 linear layers on tensor cores in Triton",
    instead="Plain torch operations serve",
    cost="norms are found in float64 and sums in float32, without tensor cores",
    probe=trials.try_float32_products,
)
GLUON_SUMS = Backend(
    name="Sums of linear layers in Gluon",
    instead="Plain Triton serves",
    cost="weighted sums of linear layers took 1.2 to 1.4 times as long on an H200",
    probe=trials.try_gluon_sums,
)


def may_take(backend: Backend, device: torch.device) -> bool:
    """Whether a backend written in Triton serves on a device."""
    return device.type == "cuda" and triton_available() and backend.serves(device)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether this is a Hopper GPU, for which the Gluon kernels are written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tensor cores multiply this type here; float32 only where the user allows TF32."""
    if dtype is torch.float32:
        return device.type == "cuda" and allows_tf32() and may_take(FLOAT32_PRODUCTS, device)
    return device.type == "cuda" and dtype in HALF


@functools.cache
def module(name: str) -> ModuleType:
    """A module of kernels, such as "triton.tiles", imported when first asked for."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def outer_sums(device: torch.device, dtype: torch.dtype) -> str | None:
    """The module whose weighted sums are fastest, if any serves."""
    if dtype in HALF and is_hopper(device) and may_take(GLUON_SUMS, device):
        return "gluon.weighted_sums"
    return "triton.sums" if may_take(KERNELS, device) else None


def gram_norms(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """The module for norms by Gram matrices; very wide halves are left to `plain`."""
    if dtype in HALF and width > MAX_GRAM_WIDTH:
        return None
    return "triton.linear" if may_take(KERNELS, device) else None


def aligned(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and its elements lie side by side."""
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % ROW_ALIGNMENT_BYTES == 0
        and all(
            stride * tensor.element_size() % ROW_ALIGNMENT_BYTES == 0
            for stride in tensor.stride()[:-1]
        )
    )


def aligned_copy(tensor: Tensor) -> Tensor:
    """A copy with aligned rows: those of odd length keep matrix kernels from wide loads."""
    step = ROW_ALIGNMENT_BYTES // tensor.element_size()
    width = tensor.shape[-1] if tensor.dim() else step
    if not tensor.is_cuda or width < MIN_WIDTH or width % step == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    room = -(-width // ROW_ROOM) * ROW_ROOM
    copy = tensor.new_empty((*tensor.shape[:-1], room))[..., :width]
    return copy.copy_(tensor)
