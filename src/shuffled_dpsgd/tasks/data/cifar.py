"""CIFAR-10 and CIFAR-100 from a folder: the official binary files, packs, or one `.npz`.

The official Python version holds pickles. Reading one runs whatever code is in it, so it is never
read here; the binary version has the same images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.arrays import check_classes, load_arrays, read_cifar
from shuffled_dpsgd.tasks.data.med_codec import SIDE, read_pack
from shuffled_dpsgd.tasks.data.places import data_folders, missing_file
from shuffled_dpsgd.tasks.data.published import PUBLISHED

_PIXELS = 3 * SIDE * SIDE
# Files of each split, and how many bytes of labels stand before an image; the last one counts.
_BATCHES = [f"data_batch_{number}.bin" for number in range(1, 6)]
_BINARY = {
    "cifar10": (1, {"train": _BATCHES, "test": ["test_batch.bin"]}),
    "cifar100": (2, {"train": ["train.bin"], "test": ["test.bin"]}),
}
_PICKLES = ("data_batch_1", "train", "cifar-10-batches-py", "cifar-100-python")


def read_cifar_set(name: str, path: Path) -> dict[str, tuple[Any, Any]]:
    """Images uint8 (N, 32, 32, 3) and classes of `train` and `test`."""
    num_labels = len(PUBLISHED[name].classes)
    _, files = _BINARY[name]
    if path.is_file():
        return {split: read_cifar(path, split, num_labels) for split in files}
    folders = data_folders(name, path)
    for folder in folders:
        pack = folder / f"{name}.med.xz"
        if pack.is_file():
            return _read_packed(pack, folder / "labels.npz", num_labels)
        if (folder / files["train"][0]).is_file():
            return {split: _read_binary(name, folder, split) for split in files}
        if any(item.stem != "labels" for item in folder.glob("*.npz")):
            return {split: read_cifar(folder, split, num_labels) for split in files}
    if any((folder / pickle).exists() for folder in folders for pickle in _PICKLES):
        raise InvalidArgumentError(
            "data.path",
            expected=f"the binary version of {PUBLISHED[name].title}",
            got=f"{path} with pickles, which can run any code when they are read",
            remedy=f"fetch the binary version ({PUBLISHED[name].source})",
        )
    raise missing_file(name, path, files["train"][0])


def _read_packed(pack: Path, labels: Path, num_labels: int) -> dict[str, tuple[Any, Any]]:
    if not labels.is_file():
        raise InvalidArgumentError(
            "data.path", expected=f"labels.npz beside {pack.name}", got=str(pack.parent)
        )
    names = ["train_labels", "test_labels"]
    train, test = load_arrays(labels, names)
    for name, found in zip(names, (train, test), strict=True):
        check_classes(f"{labels}: {name}", found, num_labels)
    images = read_pack(pack, len(train) + len(test))
    return {
        "train": (images[: len(train)], train.astype("int64")),
        "test": (images[len(train) :], test.astype("int64")),
    }


def _read_binary(name: str, folder: Path, split: str) -> tuple[Any, Any]:
    import numpy as np

    num_label_bytes, files = _BINARY[name]
    num_labels = len(PUBLISHED[name].classes)
    images, labels = [], []
    for file in files[split]:
        path = folder / file
        if not path.is_file():
            raise missing_file(name, folder, file)
        content = np.frombuffer(path.read_bytes(), np.uint8)
        size = num_label_bytes + _PIXELS
        if len(content) == 0 or len(content) % size:
            raise InvalidArgumentError(
                str(path),
                expected=f"records of {size} bytes each",
                got=f"{len(content)} bytes",
                remedy="fetch it again; a complete file has no remainder",
            )
        records = content.reshape(-1, size)
        found = records[:, num_label_bytes - 1]
        check_classes(str(path), found, num_labels)
        labels.append(found.astype(np.int64))
        planes = records[:, num_label_bytes:].reshape(-1, 3, SIDE, SIDE)
        images.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
    return np.concatenate(images), np.concatenate(labels)
