"""Packed images: three planes of prediction errors in one xz stream, without any loss.

The planes are green, red minus green and blue minus green, the differences shifted by 128 and
taken modulo 256. Each value is stored as its difference, modulo 256, from the median edge detector
of JPEG-LS: with the left neighbour a, the upper b and the upper left c it predicts min(a, b) where
c is at least both, max(a, b) where c is at most both, and a + b - c otherwise. The first row
predicts from the left, the first column from above, the first pixel is predicted as zero. Bytes
are ordered by plane, image, row, column.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np

from shuffled_dpsgd.errors import InvalidArgumentError

SIDE = 32
_SHIFT = 128


def read_pack(path: Path, count: int) -> Any:
    """The `count` images of a `.med.xz` file as uint8 (N, 32, 32, 3)."""
    try:
        with lzma.open(path) as file:
            content = file.read()
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise InvalidArgumentError(
            str(path),
            expected="a complete .xz file",
            got=str(error),
            remedy="fetch it again and compare its sha256",
        ) from error
    expected = 3 * count * SIDE * SIDE
    if len(content) != expected:
        raise InvalidArgumentError(
            str(path), expected=f"{expected} bytes for {count} images", got=len(content)
        )
    return decode(content, count)


def decode(content: bytes, count: int, side: int = SIDE) -> Any:
    """Images uint8 (N, side, side, 3) from the bytes described above.

    Pixels follow from their neighbours, so they are restored one place after the other, but in
    all planes of all images at once: place before image in memory makes that fast.
    """
    errors = np.frombuffer(content, np.uint8).reshape(3 * count, side * side)
    errors_PN = np.ascontiguousarray(errors.T).astype(np.int16)
    planes = np.zeros((side, side, 3 * count), np.int16)
    for y in range(side):
        for x in range(side):
            planes[y, x] = (errors_PN[y * side + x] + predict(planes, y, x)) & 255
    green, red, blue = planes.reshape(side, side, 3, count).transpose(2, 3, 0, 1)
    colours = [(red - _SHIFT + green) & 255, green, (blue - _SHIFT + green) & 255]
    return np.stack(colours, axis=-1).astype(np.uint8)


def encode(images: Any) -> bytes:
    """What `decode` reads: for tests, and to write packs of one's own."""
    red, green, blue = (images[..., colour].astype(np.int16) for colour in range(3))
    shifted = [green, (red - green + _SHIFT) & 255, (blue - green + _SHIFT) & 255]
    count, side = images.shape[:2]
    planes = np.stack(shifted).reshape(3 * count, side, side).transpose(1, 2, 0)
    errors = np.empty(planes.shape, np.uint8)
    for y in range(side):
        for x in range(side):
            errors[y, x] = (planes[y, x] - predict(planes, y, x)) & 255
    return np.ascontiguousarray(errors.transpose(2, 0, 1)).tobytes()


def predict(planes: Any, y: int, x: int) -> Any:
    """What the median edge detector expects at a place, from those before it."""
    if y == 0 or x == 0:
        before = planes[y - 1, 0] if y else planes[0, x - 1]
        return before if y or x else np.zeros_like(planes[0, 0])
    left, up, corner = planes[y, x - 1], planes[y - 1, x], planes[y - 1, x - 1]
    low, high = np.minimum(left, up), np.maximum(left, up)
    # The median of low, high and left + up - corner is the same three cases in one.
    return np.clip(left + up - corner, low, high)
