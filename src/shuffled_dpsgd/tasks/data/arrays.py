"""Images and classes from an `.npz` file: checked as a whole, never guessed at.

A layout or a scale that is guessed wrong trains on noise and spends the budget for it.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.tables import require_columns, shortened

_LAYOUT = "images of shape (N, height, width, 3)"


def read_cifar(folder: Path, split: str, num_labels: int) -> tuple[Any, Any]:
    """CIFAR as numpy arrays: images uint8 (N, H, W, 3) and integer labels.

    `folder` is an `.npz` file, or a folder with exactly one, holding `train_images`,
    `train_labels`, `test_images`, `test_labels`.
    """
    path = _find(folder)
    part = "train" if split == "train" else "test"
    images, labels = load_arrays(path, [f"{part}_images", f"{part}_labels"])
    _check_images(f"{path}: {part}_images", images)
    check_classes(f"{path}: {part}_labels", labels, num_labels)
    if len(images) != len(labels):
        raise InvalidArgumentError(
            f"{path}: {part}_labels",
            expected=f"one for each of {len(images)} images",
            got=len(labels),
        )
    return images, labels.astype("int64")


def _find(folder: Path) -> Path:
    if folder.is_dir():
        found = sorted(item for item in folder.glob("*.npz") if item.stem != "labels")
        if len(found) != 1:
            raise InvalidArgumentError(
                "data.path",
                expected="a folder with exactly one .npz of images",
                got=f"{folder} ({len(found)} found)",
                remedy="unpack the images to one .npz and name that file",
            )
        return found[0]
    if not folder.is_file():
        raise InvalidArgumentError(
            "data.path", expected="an .npz file or a folder", got=str(folder)
        )
    return folder


def load_arrays(path: Path, names: list[str]) -> list[Any]:
    """The named arrays of an `.npz` file; Python objects in it are never unpickled."""
    import numpy as np

    try:
        with path.open("rb") as file:  # numpy leaves a file open that it cannot read
            arrays = np.load(file)
            if not hasattr(arrays, "files"):
                raise InvalidArgumentError(
                    str(path), expected=f"an .npz with {names}", got="a single array"
                )
            require_columns(path, list(arrays), names)
            return [arrays[name] for name in names]
    except InvalidArgumentError:
        raise
    except (ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        remedy = "save it again with numpy.savez"
        if "pickle" in str(error):
            remedy = "it holds Python objects or is no .npz: save numbers with numpy.savez"
        raise InvalidArgumentError(
            str(path),
            expected="a complete .npz file of numbers",
            got=str(error) or type(error).__name__,
            remedy=remedy,
        ) from error


def _check_images(where: str, images: Any) -> None:
    shape = tuple(images.shape)
    if images.ndim == 3 or (images.ndim == 4 and shape[-1] == 1):
        raise InvalidArgumentError(
            where,
            expected=_LAYOUT,
            got=shape,
            remedy="grey images need three equal channels: "
            "numpy.repeat(images.reshape(n, h, w, 1), 3, axis=-1)",
        )
    if images.ndim == 4 and shape[1] == 3 and shape[-1] != 3:
        raise InvalidArgumentError(
            where,
            expected=_LAYOUT,
            got=shape,
            remedy="put the channels last: images.transpose(0, 2, 3, 1)",
        )
    if images.ndim != 4 or shape[-1] != 3 or 0 in shape[1:]:
        raise InvalidArgumentError(where, expected=_LAYOUT, got=shape)
    if images.dtype != "uint8":
        raise InvalidArgumentError(
            where,
            expected="uint8 pixels from 0 to 255",
            got=str(images.dtype),
            remedy="scale to 0 … 255 and convert: (images * 255).round().astype('uint8') for "
            "images in [0, 1]",
        )


def check_classes(where: str, labels: Any, num_labels: int) -> None:
    """Refuse labels that are not one class from 0 to `num_labels` - 1 for each image."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InvalidArgumentError(
            where,
            expected="one whole number per image",
            got=f"{labels.dtype} of shape {tuple(labels.shape)}",
            remedy="number the classes from 0",
        )
    wrong = [int(i) for i in ((labels < 0) | (labels >= num_labels)).nonzero()[0][:1]]
    if wrong:
        raise InvalidArgumentError(
            f"{where}, record {wrong[0]}",
            expected=f"a class from 0 to {num_labels - 1}",
            got=shortened(int(labels[wrong[0]])),
            remedy="correct the record, or data.num_labels",
        )
