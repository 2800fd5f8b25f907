"""Whether samples, or rows of two batches, are the same bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def shapes(batch: Any) -> list[Any]:
    """The shapes of everything in a batch that has one."""
    return [tuple(leaf.shape) for leaf in _leaves(batch) if hasattr(leaf, "shape")]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in _leaves(value[key])]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, list) and any(isinstance(v, Tensor | np.ndarray) for v in value):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def same_row(one: Any, two: Any, row: int, size: int) -> bool:
    """Whether one of `size` rows is the same in two batches."""
    return all(
        _same_leaf(a, b, row, size) for a, b in zip(_leaves(one), _leaves(two), strict=False)
    )


def _same_leaf(a: Any, b: Any, row: int, size: int) -> bool:
    if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray):
        if a.shape[:1] != (size,) or b.shape[:1] != (size,):
            return True
        return _same_numbers(torch.as_tensor(a[row]), torch.as_tensor(b[row]))
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == size:
        return same(a[row], b[row])
    return True


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bit for bit over the common width, at whichever end the padding is."""
    if a.dtype != b.dtype or a.dim() != b.dim():
        return False
    common = [min(lengths) for lengths in zip(a.shape, b.shape, strict=True)]
    heads = [tensor[tuple(slice(0, n) for n in common)] for tensor in (a, b)]
    if _equal(*heads):
        return True
    ends = [
        tensor[
            tuple(slice(length - n, length) for n, length in zip(common, tensor.shape, strict=True))
        ]
        for tensor in (a, b)
    ]
    return a.shape != b.shape and _equal(*ends)


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same(a: Any, b: Any) -> bool:
    """Whether two samples are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and _equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and pickle.dumps(a) == pickle.dumps(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if getattr(type(a), "__eq__", None) in (None, object.__eq__):
        return pickle.dumps(a) == pickle.dumps(b)
    return bool(a == b) or bool(a != a and b != b)
