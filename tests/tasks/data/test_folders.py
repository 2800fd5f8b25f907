"""Published layouts are read from files the tests write themselves."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.image_files import read_npz
from shuffled_dpsgd.tasks.data.loading import (
    Continuation,
    LabelledText,
    Referenced,
    read_continuations,
    read_references,
    read_texts,
)
from shuffled_dpsgd.tasks.data.published import PUBLISHED


def config(name: str, folder: Path, **more: Any) -> DataConfig:
    return DataConfig(format=name, path=str(folder), **more)  # type: ignore[arg-type]


def read_train(name: str, folder: Path) -> Any:
    """All records to train on but for one, which is scored: no other file need be there."""
    read = read_continuations if PUBLISHED[name].task == "causal-lm" else read_labelled
    splits = read(config(name, folder, heldout_from_train=1))
    return sorted([*splits.train, *splits.heldout["held-back"]])


def read_labelled(data: DataConfig) -> Any:
    return read_texts(data, len(PUBLISHED[data.format].classes))


def write_xz(path: Path, text: str) -> None:
    path.write_bytes(lzma.compress(text.encode("utf-8")))


def test_sst2_keeps_quotes_and_reads_xz(tmp_path: Path) -> None:
    write_xz(tmp_path / "train.tsv.xz", 'sentence\tlabel\na "quoted film \t1\nbad \t0\n')
    assert read_train("sst2", tmp_path) == [
        LabelledText(texts=('a "quoted film ',), label=1),
        LabelledText(texts=("bad ",), label=0),
    ]


def test_plain_files_are_read_too(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text(f"sentence\tlabel\n{split}\t1\n")
    found = read_labelled(config("sst2", tmp_path))
    assert found.train == [LabelledText(texts=("train",), label=1)]
    assert found.heldout == {"dev": [LabelledText(texts=("dev",), label=1)]}


def test_qnli_finds_columns_by_name_and_accepts_a_partial_file(tmp_path: Path) -> None:
    write_xz(
        tmp_path / "train_partial.tsv.xz",
        "index\tquestion\tsentence\tlabel\tsource\n" + 2 * "7\tWho?\tHe.\tnot_entailment\tx\n",
    )
    assert read_train("qnli", tmp_path) == 2 * [LabelledText(texts=("Who?", "He."), label=1)]


def test_e2e_reads_quoted_csv_with_a_byte_order_mark(tmp_path: Path) -> None:
    row = '"name[A], food[B]",A serves B.\n'
    write_xz(tmp_path / "trainset.csv.xz", "\ufeffmr,ref\n" + 2 * row)
    expected = Continuation(prompt="name[A], food[B]", target="A serves B.")
    assert read_train("e2e", tmp_path) == 2 * [expected]


DART = [
    {
        "tripleset": [["A", "is", "B"], ["A", "has", "C"]],
        "annotations": [{"source": "x", "text": "one"}, {"source": "e2e", "text": "two"}],
    },
    {"tripleset": [["D", "is", "E"]], "annotations": [{"source": "e2e", "text": "three"}]},
    {"tripleset": [["F", "is", "G"]], "annotations": [{"text": ""}, {"text": "four"}]},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("test.jsonl", "".join(json.dumps(item) + "\n" for item in DART)),
        ("dart-v1.1.1-full-test.json", json.dumps(DART, indent=2).replace("\n", "\r\n")),
    ],
)
def test_dart_keeps_all_references_of_an_item(tmp_path: Path, name: str, text: str) -> None:
    for split in ("train", "test"):
        (tmp_path / name.replace("test", split)).write_bytes(text.encode())
    data = config("dart", tmp_path, heldout_split="test")
    records = read_continuations(data).train
    first = "A : is : B | A : has : C"
    assert records[:2] == [Continuation(first, "one", "x"), Continuation(first, "two", "e2e")]
    assert [record.target for record in records] == ["one", "two", "three", "", "four"]
    assert read_references(data) == [
        Referenced(prompt=first, references=("one", "two")),
        Referenced(prompt="D : is : E", references=("three",)),
        Referenced(prompt="F : is : G", references=("four",)),
    ]
    left = read_references(config("dart", tmp_path, exclude_sources=("e2e",)), "test")
    assert [(one.prompt, one.references) for one in left] == [
        (first, ("one",)),
        ("F : is : G", ("four",)),
    ]


def test_e2e_keeps_all_references_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "testset_w_refs.csv").write_text("mr,ref\na,one\nb,two\na,three\n")
    assert read_references(config("e2e", tmp_path), "test") == [
        Referenced(prompt="a", references=("one", "three")),
        Referenced(prompt="b", references=("two",)),
    ]


def test_mnli_reads_glues_files_and_finds_both_held_out_splits(tmp_path: Path) -> None:
    folder = tmp_path / "MNLI"
    folder.mkdir()
    header = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
    for split, label in (("dev_matched", "contradiction"), ("dev_mismatched", "neutral")):
        (folder / f"{split}.tsv").write_text(f'{header}0\tx\tA "b.\tC.\tneutral\t{label}\n')
    shutil.copy(folder / "dev_matched.tsv", folder / "train.tsv")
    found = read_labelled(config("mnli", tmp_path)).heldout
    assert list(found) == ["matched", "mismatched"]
    assert found["matched"] == [LabelledText(texts=('A "b.', "C."), label=2)]
    assert found["mismatched"][0].label == 1


def test_mnli_leaves_out_what_has_no_class_and_reads_a_single_dev_file(tmp_path: Path) -> None:
    rows = [
        {"sentence1": "a", "sentence2": "b", "gold_label": "-"},
        {"sentence1": "c", "sentence2": "d", "gold_label": "entailment"},
    ]
    (tmp_path / "multinli_1.0_train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"premise": "a", "hypothesis": "b", "label": "neutral", "source": "x"}
    write_xz(tmp_path / "mnli_dev_subset.jsonl.xz", json.dumps(own))
    found = read_labelled(config("mnli", tmp_path))
    assert found.train == [LabelledText(texts=("c", "d"), label=0)]
    assert found.heldout == {"dev": [LabelledText(texts=("a", "b"), label=1)]}


def test_qqp_leaves_out_the_few_lines_its_file_has_broken(tmp_path: Path) -> None:
    good = [f"{i}\t1\t2\twhat {i}\twho {i}\t{i % 2}" for i in range(2000)]
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    broken = ["7\t1\t2\ta question", "broken in two\tanother\t0"]
    (tmp_path / "train.tsv").write_text("\n".join([header, *broken, *good]))
    with pytest.warns(UserWarning, match=r"left out 2 lines .* line 2 the first"):
        found = read_train("qqp", tmp_path)
    assert len(found) == 2000
    assert LabelledText(texts=("what 1", "who 1"), label=1) in found
    (tmp_path / "train.tsv").write_text("\n".join([header, *broken, *good[:100]]))
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv:2.*6 columns"):
        read_train("qqp", tmp_path)


def test_cifar_reads_one_npz(tmp_path: Path) -> None:
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    np.savez(
        tmp_path / "images.npz",
        train_images=images,
        train_labels=np.array([1, 2], dtype=np.uint8),
        test_images=images[:1],
        test_labels=np.array([0], dtype=np.uint8),
    )
    read, labels = read_npz(tmp_path, "train", 10)
    assert np.array_equal(read, images)
    assert labels.tolist() == [1, 2]
    assert len(read_npz(tmp_path / "images.npz", "test", 10)[1]) == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            '[{"tripleset": [], "annotations": []},\n {"tripleset": []}]',
            r"json, item 2.*annotations",
        ),
        (
            '[{"tripleset": [], "annotations": {"source": ["a", "b"], "text": ["c"]}}]',
            r"json, item 1.*as many texts as sources",
        ),
        ('[{"tripleset": [], "annotations": {"source": 3, "text": []}}]', r"json, item 1.*as many"),
        ('[\n{"tripleset": [],\n"annotations": []}\n{}]', r"json:4.*','"),
        ('[\n{"tripleset": []', r"json:2.*JSON object"),
        ("{}", r"dev\.json: expected a list of JSON objects, got 'dict'"),
        ('[{"tripleset": [], "annotations": []}', r"json:1.*','"),
    ],
)
def test_faults_of_a_json_list_name_the_line_or_the_item(
    tmp_path: Path, text: str, match: str
) -> None:
    (tmp_path / "dev.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=match):
        read_references(config("dart", tmp_path), "dev")


def test_an_absent_folder_says_what_to_put_where(tmp_path: Path) -> None:
    for name in ("sst2", "qqp", "mnli", "qnli"):
        with pytest.raises(InvalidArgumentError, match=r"absent, which is not there; put there"):
            read_train(name, tmp_path / "absent")
    with pytest.raises(InvalidArgumentError, match=r"e2e-dataset\.zip"):
        read_train("e2e", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"dart-v1\.1\.1-full-train\.json"):
        read_train("dart", tmp_path)


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv"):
        read_train("sst2", tmp_path)
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\t1\n")
    with pytest.raises(InvalidArgumentError, match="sentence"):
        read_train("sst2", tmp_path)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nx\n")
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv:2"):
        read_train("sst2", tmp_path)
    (tmp_path / "train.tsv").write_text("question\tsentence\tlabel\nq\ts\tmaybe\n")
    with pytest.raises(InvalidArgumentError, match="maybe"):
        read_train("qnli", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"exactly one \.npz"):
        read_npz(tmp_path, "train", 10)
    with pytest.raises(InvalidArgumentError, match=r"an \.npz file"):
        read_npz(tmp_path / "absent.npz", "train", 10)
