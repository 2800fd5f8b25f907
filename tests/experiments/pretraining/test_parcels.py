"""Files in parcels come back whole, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.pretraining.parcels import cut, join, main


def test_a_file_comes_back_whole(tmp_path: Path) -> None:
    file = tmp_path / "images.xz"
    file.write_bytes(bytes(range(256)) * 5)
    parcels = cut(file, tmp_path / "parcels", 500)
    assert [parcel.name for parcel in parcels] == ["0", "1", "2"]
    assert max((parcel / "piece").stat().st_size for parcel in parcels) == 500
    main(["join", str(tmp_path / "parcels"), "--to", str(tmp_path / "there")])
    assert (tmp_path / "there" / "images.xz").read_bytes() == file.read_bytes()


def test_anything_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "images.xz"
    file.write_bytes(b"a" * 1000)
    parcels = cut(file, tmp_path / "parcels", 500)
    (parcels[1] / "piece").write_bytes(b"b" * 500)
    with pytest.raises(InvalidArgumentError, match="cut it again"):
        join(tmp_path / "parcels", tmp_path)
    shutil.rmtree(parcels[1])
    with pytest.raises(InvalidArgumentError, match=r"without \[1\]"):
        join(tmp_path / "parcels", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"without \[0\]"):
        join(tmp_path / "absent", tmp_path)
