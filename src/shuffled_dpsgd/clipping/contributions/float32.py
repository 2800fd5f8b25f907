"""Matrix products of the book-keeping run in full float32, whatever the model's own may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KNOBS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and bfloat16 shortcuts off inside.

    A user may train with `allow_tf32`; norms and sums then still see the same captured gradients,
    but ten bits of mantissa would let a sample contribute a thousandth more than clip_norm.
    """
    before = [knob.fp32_precision for knob in _KNOBS]
    if all(precision in ("none", "ieee") for precision in before):
        yield
        return
    try:
        for knob in _KNOBS:
            knob.fp32_precision = "ieee"
        yield
    finally:
        for knob, precision in zip(_KNOBS, before, strict=True):
            knob.fp32_precision = precision
