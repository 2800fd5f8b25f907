"""A keyed digest of records: equal for equal records in equal order.

Whoever has neither the key nor the records learns nothing from it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from shuffled_dpsgd.training.data import MapStyle


def digest(data: MapStyle, salt: bytes) -> str:
    """Equal for equal records in equal order; 64 hexadecimal digits.

    >>> digest([(1, "a")], b"s") == digest([(1, "a")], b"s") != digest([(1, "b")], b"s")
    True
    """
    whole = hashlib.blake2b(key=salt, digest_size=32)
    for index in range(len(data)):
        _add(whole, data[index])
    return whole.hexdigest()


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
