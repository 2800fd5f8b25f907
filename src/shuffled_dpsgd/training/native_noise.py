"""Noise on the CPU in one pass of compiled C, from the random bits that `box_muller` uses.

numpy goes over the numbers some twenty times. A third of its time is enough for `noise.c`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shuffled_dpsgd.runtime.c_library import load_library
from shuffled_dpsgd.training.box_muller import NoisedPart

_SOURCE = Path(__file__).with_name("noise.c")
_STATE_WORDS = 4
# Working memory that no thread uses now: getting fresh memory takes longer than filling it.
_free: list[NDArray[np.float32]] = []


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled functions.

    Raises:
        CannotBuildError: there are none.
    """
    found = load_library(_SOURCE)
    address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    found.standard_normal.argtypes = [address, address, size]
    found.add_noise.argtypes = [address, address, size, number, number]
    for function in (found.standard_normal, found.add_noise):
        function.restype = None
    return found


def fill_normal(rng: np.random.Generator, size: int, out: NDArray[np.float32]) -> None:
    """Write `size` standard normal numbers into `out`, which has room for an even number of them.

    The generator must be a fresh SFC64. It stays where it is.
    """
    state = np.array(rng.bit_generator.state["state"]["state"], dtype=np.uint64)
    assert state.size == _STATE_WORDS, "this is not SFC64's state"
    assert out.flags.c_contiguous
    assert out.size >= size + size % 2
    library().standard_normal(state.ctypes.data, out.ctypes.data, size)


def add_normals(
    rng: np.random.Generator, size: int, parts: Sequence[NoisedPart], divide_by: float
) -> None:
    """As `box_muller.add_normals`, for float32, to rounding."""
    room = size + size % 2
    held = _free.pop() if _free else np.empty(room, dtype=np.float32)
    if held.size < room:
        held = np.empty(room, dtype=np.float32)
    fill_normal(rng, size, held)
    for target, first, std in parts:
        assert target.flags.c_contiguous
        assert first + target.size <= size
        numbers = held[first:]
        library().add_noise(target.ctypes.data, numbers.ctypes.data, target.size, std, divide_by)
    _free.append(held)
