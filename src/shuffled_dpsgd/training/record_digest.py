"""A keyed digest of records: equal for equal records in equal order.

Whoever has neither the key nor the records learns nothing from it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.global_randomness import randomness_kept, seed_dropout

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


def data_mark(data: MapStyle, salt: str) -> str:
    """Equal for equal records, known from their number and from records spread over them.

    Records that are drawn anew at each load are compared under the same random numbers.
    """
    chosen = range(0, len(data), max(1, len(data) // _RECORDS))

    def once() -> str:
        with randomness_kept():
            seed_dropout(0)
            return digest([data[index] for index in chosen], bytes.fromhex(salt))

    found = once()
    if found != once():
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
    """What one record is told from others by; for memory only, since it has no key."""
    whole = hashlib.blake2b(digest_size=16)
    _add(whole, record)
    return whole.digest()


def _add(whole: Any, value: Any) -> None:
    """Each value with its kind and length before it, so that no two can run together."""
    if isinstance(value, tuple | list):
        if value and all(type(item) is int for item in value):
            _add_bytes(whole, "ints", repr(value).encode())
            return
        whole.update(f"sequence:{len(value)}:".encode())
        for item in value:
            _add(whole, item)
    elif isinstance(value, dict):
        _add(whole, [part for key in sorted(value) for part in (key, value[key])])
    elif isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        kind = f"tensor:{array.dtype}:{tuple(array.shape)}"
        _add_bytes(whole, kind, array.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):
        shape = getattr(value, "shape", None) or getattr(value, "size", None)
        content = getattr(value, "dtype", None) or getattr(value, "mode", None)
        _add_bytes(whole, f"array:{content}:{shape}", value.tobytes())
    else:
        _add_bytes(whole, type(value).__name__, repr(value).encode())


def _add_bytes(whole: Any, kind: str, content: bytes) -> None:
    whole.update(f"{kind}:{len(content)}:".encode())
    whole.update(content)
