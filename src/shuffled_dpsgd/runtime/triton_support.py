"""Whether Triton is at hand; every room asks here."""

from __future__ import annotations

import functools
import importlib.util
import os

SWITCH = "SHUFFLED_DPSGD_TRITON"


@functools.cache
def triton_available() -> bool:
    """Whether Triton can be imported; `SHUFFLED_DPSGD_TRITON=0` turns it off.

    Answered once in a process, without importing Triton.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return False
    return importlib.util.find_spec("triton") is not None
