"""Whether Triton kernels are at hand."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType


@functools.cache
def find_kernels() -> ModuleType | None:
    """The Triton kernels, or None without Triton; SHUFFLED_DPSGD_TRITON=0 says none."""
    if os.environ.get("SHUFFLED_DPSGD_TRITON", "1") == "0":
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from shuffled_dpsgd.permutation.move import triton_kernels

    return triton_kernels
