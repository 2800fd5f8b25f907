"""Attention without the kernels that are wrong or slow here.

PyTorch prefers cuDNN's on Hopper and later chips. With PyTorch 2.11 and later their backward
returns NaN for some masked batches (a length of 64 beyond a multiple of 128, and small logits):
every sample of the batch then has no finite gradient, and contributes nothing. They also plan anew
for every new shape of a batch, which takes 0.1 s on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

_OTHERS = {SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION}


def allowed_kernels() -> frozenset[SDPBackend]:
    """Which kernels PyTorch may choose now; each draws other dropout masks from the same state."""
    return frozenset(_cur_sdpa_kernel_backends())


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Have PyTorch take its other kernels inside, unless the user left it no other."""
    others = allowed_kernels() & _OTHERS
    with sdpa_kernel([*others]) if others else nullcontext():
        yield


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Have attention run without what is fast for many batches of one shape only.

    PyTorch's encoders have a shortcut for inference that packs a padded batch into a nested tensor,
    which has no shape. In training they call their layers, so they do here. And cuDNN plans for
    every new shape of attention: a check sees a shape once.
    """
    kernels = allowed_kernels()
    with same_attention(kernels & _OTHERS or kernels):
        yield


@contextmanager
def same_attention(kernels: frozenset[SDPBackend]) -> Iterator[None]:
    """Have a second run choose from these kernels, and not from shortcuts for inference."""
    shortcut = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel([*kernels]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(shortcut)
