"""CIFAR from official binary files, written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.image_files import read_cifar


def pictures(count: int, side: int = 32) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def binary(path: Path, images: Any, *labels: Any) -> None:
    """Label bytes, then the red, the green and the blue plane, record after record."""
    pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    columns = [np.asarray(column, np.uint8)[:, None] for column in labels]
    path.write_bytes(np.concatenate([*columns, pixels], axis=1).tobytes())


def read_both(name: str, folder: Path) -> dict[str, tuple[Any, Any]]:
    return {split: read_cifar(name, folder, split) for split in ("train", "test")}


def test_the_binary_version_of_cifar10(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    images = pictures(12)
    for number in range(5):
        part = slice(2 * number, 2 * number + 2)
        binary(folder / f"data_batch_{number + 1}.bin", images[part], [number, 9])
    binary(folder / "test_batch.bin", images[10:], [3, 4])
    found = read_both("cifar10", tmp_path)
    assert np.array_equal(found["train"][0], images[:10])
    assert found["train"][1].tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert np.array_equal(found["test"][0], images[10:])


def test_the_binary_version_of_cifar100_counts_fine_classes(tmp_path: Path) -> None:
    images = pictures(3)
    binary(tmp_path / "train.bin", images[:2], [1, 2], [30, 99])
    binary(tmp_path / "test.bin", images[2:], [0], [7])
    found = read_both("cifar100", tmp_path)
    assert found["train"][1].tolist() == [30, 99]
    assert np.array_equal(found["test"][0], images[2:])


def test_faults_name_the_file_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cifar-100-binary\.tar\.gz"):
        read_both("cifar100", tmp_path)
    (tmp_path / "train").write_bytes(b"\x80\x03")
    with pytest.raises(InvalidArgumentError, match="pickles, which can run any code"):
        read_both("cifar100", tmp_path)
    images = pictures(2)
    binary(tmp_path / "train.bin", images, [0, 0], [5, 100])
    with pytest.raises(InvalidArgumentError, match=r"train\.bin, record 1: expected a class"):
        read_both("cifar100", tmp_path)
    (tmp_path / "train.bin").write_bytes(b"0" * 3073)
    with pytest.raises(InvalidArgumentError, match=r"train\.bin: expected records of 3074 bytes"):
        read_both("cifar100", tmp_path)
    binary(tmp_path / "train.bin", images, [0, 0], [5, 6])
    with pytest.raises(InvalidArgumentError, match=r"test\.bin"):
        read_both("cifar100", tmp_path)
