"""Matrix products of the book-keeping run in full float32, whatever the model's own may use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KNOBS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


# The switches belong to the whole process. So the first thread in sets them, and the last one out
# sets them back.
_lock = threading.Lock()
_inside = 0
_before: list[str] = []


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and bfloat16 shortcuts off inside.

    A user may train with `allow_tf32`; norms and sums then still see the same captured gradients,
    but ten bits of mantissa would let a sample contribute a thousandth more than clip_norm.
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = [knob.fp32_precision for knob in _KNOBS]
            _switch(["ieee" if p not in ("none", "ieee") else p for p in _before])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _switch(_before)


def allows_tf32() -> bool:
    """Whether the user lets products of float32 on a GPU run in TF32, also while that is off."""
    with _lock:
        return (_before if _inside else [knob.fp32_precision for knob in _KNOBS])[0] == "tf32"


def _switch(precisions: list[str]) -> None:
    """Set only switches that differ: one set by itself stops following the global setting."""
    for knob, precision in zip(_KNOBS, precisions, strict=True):
        if knob.fp32_precision != precision:
            knob.fp32_precision = precision
