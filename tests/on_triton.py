"""Where Triton's kernels are tested: on a GPU, else in the interpreter; skipped without Triton.

To be imported before any kernel, for they are made for the one or the other. The interpreter
multiplies no bfloat16 matrices, so without a GPU operands are float16.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16


def draw(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
