"""Attention without the kernels that are wrong or slow here.

PyTorch prefers cuDNN's on Hopper and later chips. With PyTorch 2.11 and later their backward
returns NaN for some masked batches (a length of 64 beyond a multiple of 128, and small logits):
every sample of the batch then has no finite gradient, and contributes nothing. They also plan anew
for every new shape of a batch, which takes 0.1 s on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
