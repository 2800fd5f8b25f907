"""Where Triton's kernels are tested: on a GPU, else in the interpreter; skipped without Triton.

Import this before any kernel: a kernel is made for the one or the other when it is defined. The
interpreter multiplies no bfloat16 matrices, so without a GPU operands are float16.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16


def cases(*values: Any, interpreted: Sequence[Any]) -> Sequence[Any]:
    """All values on a GPU; in the interpreter, which is slow, only those named."""
    return values if ON_GPU else interpreted


def draw(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
