"""Images and classes from folders or an `.npz` file; layout and scale are never guessed.

A wrong guess would spend the privacy budget on garbage. Files with pickles can run any code when
they are read, so they are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.tasks.data.tables import shortened

_REMEDY = (
    "with numpy, images.transpose(0, 2, 3, 1) puts the channels last, numpy.repeat(images.reshape("
    "n, h, w, 1), 3, axis=-1) makes three of a grey one, and (images * 255).round().astype('uint8')"
    " scales images in [0, 1]"
)


class ImageFolder(Sequence[tuple[Any, int]]):
    """Image files with their classes; a file is read each time it is asked for."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:  # type: ignore[override]  # no slices
        path, label = self._files[index]
        return open_image(path), label

    def part(self, chosen: Sequence[int]) -> ImageFolder:
        """The records at these places."""
        return ImageFolder([self._files[index] for index in chosen])


def open_image(path: Path) -> Any:
    """An image file in RGB."""
    from PIL import Image, UnidentifiedImageError  # matplotlib needs pillow

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise InvalidArgumentError(str(path), expected="an image file", got=str(error)) from error


def folder_classes(path: Path) -> tuple[str, ...]:
    """The names of the folders in `path/train`, in order: a class each, also without images."""
    train = path / "train"
    found = sorted(each.name for each in train.iterdir() if each.is_dir()) if train.is_dir() else []
    if len(found) < 2:
        raise InvalidArgumentError(
            "data.path",
            expected="a folder with train/CLASS/… for at least two classes",
            got=f"{path}, {f'with {len(found)}' if path.is_dir() else 'which is not there'}",
        )
    return tuple(found)


def read_image_folder(path: Path, split: str) -> ImageFolder:
    """The images in `path/SPLIT/CLASS/`; `dev` may be called `val`, `validation` or `test`."""
    names = {"dev": ("dev", "val", "validation", "test")}.get(split, (split,))
    root = next((path / name for name in names if (path / name).is_dir()), None)
    if root is None:
        raise InvalidArgumentError(
            "data.path",
            expected=f"a folder {split} in {path}",
            got="none",
            remedy="hold training records back with data.heldout_from_train",
        )
    classes = folder_classes(path)
    strange = [each.name for each in sorted(root.iterdir()) if each.name not in classes]
    if strange:
        raise InvalidArgumentError(
            str(root), expected=f"folders of the classes {list(classes)}", got=strange[0]
        )
    return ImageFolder(
        [
            (file, label)
            for label, name in enumerate(classes)
            for file in sorted((root / name).rglob("*"))
            if file.is_file()
        ]
    )


def read_npz(path: Path, split: str, num_labels: int) -> tuple[Any, Any]:
    """Images uint8 (N, H, W, 3) and classes of `train`, or of `test` for any other split.

    `path` is an `.npz` file, or a folder with exactly one, holding `train_images`, `train_labels`,
    `test_images`, `test_labels`. Python objects in it are never unpickled.
    """
    import numpy as np

    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise InvalidArgumentError(
                "data.path",
                expected="a folder with exactly one .npz of images",
                got=f"{path} ({len(found)} found)",
                remedy="unpack the images to one .npz and name that file",
            )
        path = found[0]
    part = "train" if split == "train" else "test"
    names = [f"{part}_images", f"{part}_labels"]
    try:
        with path.open("rb") as file:  # numpy leaves a file open that it cannot read
            arrays = np.load(file)
            there = getattr(arrays, "files", ["a single array"])
            images, labels = (arrays[n] if n in there else None for n in names)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgumentError(
            str(path),
            expected="an .npz file of numbers",
            got=str(error) or type(error).__name__,
            remedy="save the arrays, which must be numbers and no Python objects, by numpy.savez",
        ) from error
    if images is None or labels is None:
        raise InvalidArgumentError(str(path), expected=f"an .npz with {names}", got=there)
    shape, where = tuple(images.shape), f"{path}: {names[1]}"
    if len(shape) != 4 or shape[-1] != 3 or 0 in shape[1:] or images.dtype != "uint8":
        raise InvalidArgumentError(
            f"{path}: {names[0]}",
            expected="uint8 images of shape (N, height, width, 3), from 0 to 255",
            got=f"{images.dtype} of shape {shape}",
            remedy=_REMEDY,
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InvalidArgumentError(
            where,
            expected="one whole number per image",
            got=f"{labels.dtype} of shape {tuple(labels.shape)}",
            remedy="number the classes from 0",
        )
    wrong = ((labels < 0) | (labels >= num_labels)).nonzero()[0]
    if len(wrong):
        raise InvalidArgumentError(
            f"{where}, record {wrong[0]}",
            expected=f"a class from 0 to {num_labels - 1}",
            got=shortened(int(labels[wrong[0]])),
            remedy="correct the record, or data.num_labels",
        )
    count = len(images)
    require(len(labels) == count, where, f"one for each of {count} images", len(labels))
    return images, labels.astype("int64")
