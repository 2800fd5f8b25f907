"""Compares records, and rows of batches, bit for bit; and computes digests of them.

A keyed digest reveals nothing to anybody without the key or the records.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.random_states import randomness_kept
from shuffled_dpsgd.training.data import LOADING, MapStyle
from shuffled_dpsgd.training.global_randomness import seed_dropout

_RECORDS = 256


def digest(data: MapStyle, salt: bytes) -> str:
    """Equal for equal records in equal order; 64 hexadecimal digits.

    >>> digest([(1, "a")], b"s") == digest([(1, "a")], b"s") != digest([(1, "b")], b"s")
    True
    """
    whole = hashlib.blake2b(key=salt, digest_size=32)
    for index in range(len(data)):
        _add(whole, data[index])
    return whole.hexdigest()


def digest_of_some(data: MapStyle, chosen: Iterable[int], salt: bytes, seed: int) -> str | None:
    """The digest of these records, loaded under random numbers of a seed; None if it varies."""
    found = []
    for _ in range(2):
        with LOADING, randomness_kept():
            seed_dropout(seed)
            found.append(digest([data[index] for index in chosen], salt))
    return found[0] if found[0] == found[1] else None


def data_mark(data: MapStyle, salt: str) -> str:
    """Equal for equal records, known from their number and from records spread over them."""
    chosen = range(0, len(data), max(1, len(data) // _RECORDS))
    found = digest_of_some(data, chosen, bytes.fromhex(salt), seed=0)
    if found is None:
        raise InvalidArgumentError(
            "budget",
            expected="records that load alike each time, by which a budget knows its data",
            got="records that differ from one load to the next",
            remedy="augment in the collate function, or by the generators of torch or numpy",
        )
    return keyed(f"{len(data)}:{found}".encode(), salt)


def keyed(content: bytes, salt: str) -> str:
    """A short digest under a salt in hexadecimal digits."""
    return hashlib.blake2b(content, key=bytes.fromhex(salt), digest_size=12).hexdigest()


def row_digest(record: Any) -> bytes:
    """A digest that identifies a record; never stored, because it has no key."""
    whole = hashlib.blake2b(digest_size=16)
    _add(whole, record)
    return whole.digest()


def same(one: Any, other: Any) -> bool:
    """Whether two records are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _bits(one) == _bits(other)
    return row_digest(one) == row_digest(other)


def same_row(one: Any, other: Any, row: int, size: int) -> bool:
    """Whether one of `size` rows is the same in two batches, over the width that both have."""
    for pair in zip(leaves(one), leaves(other), strict=False):
        a, b = (_row(leaf, row, size) for leaf in pair)
        if a is None or b is None or same(a, b):
            continue
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim()):
            return False
        common = [min(lengths) for lengths in zip(a.shape, b.shape, strict=True)]
        # Padding may be at either end.
        if not any(same(_cut(a, common, end), _cut(b, common, end)) for end in (False, True)):
            return False
    return True


def shapes(batch: Any) -> list[Any]:
    """The shapes of everything in a batch that has one."""
    return [tuple(leaf.shape) for leaf in leaves(batch) if hasattr(leaf, "shape")]


def leaves(value: Any) -> list[Any]:
    """What a record or a batch is made of, inside mappings, tuples and lists of arrays."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves(value[key])]
    has_arrays = isinstance(value, list) and any(isinstance(v, Tensor | np.ndarray) for v in value)
    if isinstance(value, tuple) or has_arrays:
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def _row(leaf: Any, row: int, size: int) -> Any:
    """One row of what has an entry for each row."""
    if isinstance(leaf, Tensor | np.ndarray) and leaf.shape[:1] == (size,):
        return torch.as_tensor(leaf[row])
    return leaf[row] if isinstance(leaf, list) and len(leaf) == size else None


def _cut(tensor: Tensor, lengths: list[int], at_end: bool) -> Tensor:
    pairs = zip(tensor.shape, lengths, strict=True)
    return tensor[tuple(slice(have - n, have) if at_end else slice(n) for have, n in pairs)]


def _add(whole: Any, value: Any) -> None:
    """Add a value after its kind and length, so that adjacent values cannot be confused."""
    if isinstance(value, tuple | list):
        if value and all(type(item) is int for item in value):
            _add_bytes(whole, "ints", repr(value).encode())
            return
        whole.update(f"sequence:{len(value)}:".encode())
        for item in value:
            _add(whole, item)
    elif isinstance(value, Mapping):
        _add(whole, [part for key in sorted(value) for part in (key, value[key])])
    elif isinstance(value, Tensor):
        _add_bytes(whole, f"tensor:{value.dtype}:{tuple(value.shape)}", _bits(value))
    elif hasattr(value, "tobytes") and not (
        isinstance(value, np.ndarray) and value.dtype.hasobject
    ):
        shape = getattr(value, "shape", None) or getattr(value, "size", None)
        content = getattr(value, "dtype", None) or getattr(value, "mode", None)
        _add_bytes(whole, f"array:{content}:{shape}", value.tobytes())
    elif isinstance(value, np.ndarray) or not _has_text(value):
        # A text would leave entries out, or tell where an object lies.
        _add_bytes(whole, type(value).__name__, pickle.dumps(value))
    else:
        _add_bytes(whole, type(value).__name__, repr(value).encode())


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _has_text(value: Any) -> bool:
    return any("__repr__" in vars(kind) for kind in type(value).__mro__ if kind is not object)


def _add_bytes(whole: Any, kind: str, content: bytes) -> None:
    whole.update(f"{kind}:{len(content)}:".encode())
    whole.update(content)
