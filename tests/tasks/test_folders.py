"""Published layouts are read from files the tests write themselves."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.arrays import read_cifar
from shuffled_dpsgd.tasks.folders import (
    Continuation,
    LabelledText,
    read_dart,
    read_e2e,
    read_qnli,
    read_sst2,
)


def write_xz(path: Path, text: str) -> None:
    path.write_bytes(lzma.compress(text.encode("utf-8")))


def test_sst2_keeps_quotes_and_reads_xz(tmp_path: Path) -> None:
    write_xz(tmp_path / "train.tsv.xz", 'sentence\tlabel\na "quoted film \t1\nbad \t0\n')
    assert read_sst2(tmp_path, "train") == [
        LabelledText(texts=('a "quoted film ',), label=1),
        LabelledText(texts=("bad ",), label=0),
    ]


def test_plain_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine\t1\n")
    assert read_sst2(tmp_path, "dev") == [LabelledText(texts=("fine",), label=1)]


def test_qnli_finds_columns_by_name_and_accepts_a_partial_file(tmp_path: Path) -> None:
    write_xz(
        tmp_path / "train_partial.tsv.xz",
        "index\tquestion\tsentence\tlabel\tsource\n7\tWho?\tHe.\tnot_entailment\tx\n",
    )
    assert read_qnli(tmp_path, "train") == [LabelledText(texts=("Who?", "He."), label=1)]


def test_e2e_reads_quoted_csv_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_xz(tmp_path / "trainset.csv.xz", '\ufeffmr,ref\n"name[A], food[B]",A serves B.\n')
    assert read_e2e(tmp_path, "train") == [
        Continuation(prompt="name[A], food[B]", target="A serves B.")
    ]


def test_dart_gives_one_example_per_annotation(tmp_path: Path) -> None:
    item = {
        "tripleset": [["A", "is", "B"], ["A", "has", "C"]],
        "annotations": [{"source": "x", "text": "one"}, {"source": "y", "text": "two"}],
    }
    write_xz(tmp_path / "dev.jsonl.xz", json.dumps(item) + "\n")
    assert read_dart(tmp_path, "dev") == [
        Continuation(prompt="A : is : B | A : has : C", target=text) for text in ("one", "two")
    ]


def test_cifar_reads_one_npz(tmp_path: Path) -> None:
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    np.savez(
        tmp_path / "images.npz",
        train_images=images,
        train_labels=np.array([1, 2], dtype=np.uint8),
        test_images=images[:1],
        test_labels=np.array([0], dtype=np.uint8),
    )
    read, labels = read_cifar(tmp_path, "train", 10)
    assert np.array_equal(read, images)
    assert labels.tolist() == [1, 2]
    assert len(read_cifar(tmp_path / "images.npz", "test", 10)[1]) == 1


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv"):
        read_sst2(tmp_path, "train")
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\t1\n")
    with pytest.raises(InvalidArgumentError, match="sentence"):
        read_sst2(tmp_path, "train")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nx\n")
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv:2"):
        read_sst2(tmp_path, "train")
    (tmp_path / "train.tsv").write_text("question\tsentence\tlabel\nq\ts\tmaybe\n")
    with pytest.raises(InvalidArgumentError, match="maybe"):
        read_qnli(tmp_path, "train")
    with pytest.raises(InvalidArgumentError, match=r"exactly one \.npz"):
        read_cifar(tmp_path, "train", 10)
    with pytest.raises(InvalidArgumentError, match=r"an \.npz file"):
        read_cifar(tmp_path / "absent.npz", "train", 10)
