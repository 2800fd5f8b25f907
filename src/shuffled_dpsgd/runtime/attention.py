"""Attention without the kernels that are wrong or slow here.

PyTorch prefers cuDNN's on Hopper and later chips. With PyTorch 2.11 and later their backward
returns NaN for some masked batches (a length of 64 beyond a multiple of 128, and small logits):
every sample of the batch then has no finite gradient, and contributes nothing. They also plan anew
for every new shape of a batch, which takes 0.1 s on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Have PyTorch take its other kernels inside, unless the user left it no other."""
    kinds = torch.backends.cuda
    others = (
        kinds.math_sdp_enabled(),
        kinds.flash_sdp_enabled(),
        kinds.mem_efficient_sdp_enabled(),
    )
    if not (kinds.cudnn_sdp_enabled() and any(others)):
        yield
        return
    kinds.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        kinds.enable_cudnn_sdp(True)


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Have attention run without what is fast for many batches of one shape only.

    PyTorch's encoders have a shortcut for inference that packs a padded batch into a nested tensor,
    which has no shape. In training they call their layers, so they do here. And cuDNN plans for
    every new shape of attention: a check sees a shape once.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with without_cudnn_attention():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class AttentionKernels(NamedTuple):
    """Which kernels PyTorch may choose from; each draws other dropout masks from the same state."""

    math: bool
    flash: bool
    efficient: bool
    cudnn: bool

    @classmethod
    def allowed(cls) -> AttentionKernels:
        """Those that may be chosen now."""
        kinds = torch.backends.cuda
        return cls(
            kinds.math_sdp_enabled(),
            kinds.flash_sdp_enabled(),
            kinds.mem_efficient_sdp_enabled(),
            kinds.cudnn_sdp_enabled(),
        )

    def allow(self) -> None:
        """Have PyTorch choose from these."""
        kinds = torch.backends.cuda
        kinds.enable_math_sdp(self.math)
        kinds.enable_flash_sdp(self.flash)
        kinds.enable_mem_efficient_sdp(self.efficient)
        kinds.enable_cudnn_sdp(self.cudnn)


@contextmanager
def same_attention(kernels: AttentionKernels) -> Iterator[None]:
    """Have a second run choose from these kernels, and not from shortcuts for inference."""
    before, shortcut = AttentionKernels.allowed(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    kernels.allow()
    try:
        yield
    finally:
        before.allow()
        torch.backends.mha.set_fastpath_enabled(shortcut)
