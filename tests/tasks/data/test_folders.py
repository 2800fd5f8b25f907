"""Published layouts are read from files the tests write themselves."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.arrays import read_cifar
from shuffled_dpsgd.tasks.data.glue import heldout_of, read_glue
from shuffled_dpsgd.tasks.data.nlg import (
    DartItem,
    dart_records,
    dart_references,
    read_dart,
    read_e2e,
)
from shuffled_dpsgd.tasks.data.records import Continuation, LabelledText, Referenced, by_prompt


def write_xz(path: Path, text: str) -> None:
    path.write_bytes(lzma.compress(text.encode("utf-8")))


def test_sst2_keeps_quotes_and_reads_xz(tmp_path: Path) -> None:
    write_xz(tmp_path / "train.tsv.xz", 'sentence\tlabel\na "quoted film \t1\nbad \t0\n')
    assert read_glue("sst2", tmp_path, "train") == [
        LabelledText(texts=('a "quoted film ',), label=1),
        LabelledText(texts=("bad ",), label=0),
    ]


def test_plain_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine\t1\n")
    assert read_glue("sst2", tmp_path, "dev") == [LabelledText(texts=("fine",), label=1)]


def test_qnli_finds_columns_by_name_and_accepts_a_partial_file(tmp_path: Path) -> None:
    write_xz(
        tmp_path / "train_partial.tsv.xz",
        "index\tquestion\tsentence\tlabel\tsource\n7\tWho?\tHe.\tnot_entailment\tx\n",
    )
    assert read_glue("qnli", tmp_path, "train") == [LabelledText(texts=("Who?", "He."), label=1)]


def test_e2e_reads_quoted_csv_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_xz(tmp_path / "trainset.csv.xz", '\ufeffmr,ref\n"name[A], food[B]",A serves B.\n')
    assert read_e2e(tmp_path, "train") == [
        Continuation(prompt="name[A], food[B]", target="A serves B.")
    ]


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
    (tmp_path / name).write_bytes(text.encode())
    items = read_dart(tmp_path, "test")
    first = "A : is : B | A : has : C"
    assert items[0] == DartItem(prompt=first, notes=(("x", "one"), ("e2e", "two")))
    assert [record.target for record in dart_records(items)] == ["one", "two", "three", "", "four"]
    assert dart_references(items) == [
        Referenced(prompt=first, references=("one", "two")),
        Referenced(prompt="D : is : E", references=("three",)),
        Referenced(prompt="F : is : G", references=("four",)),
    ]
    left = dart_references(items, ["e2e"])
    assert [(one.prompt, one.references) for one in left] == [
        (first, ("one",)),
        ("F : is : G", ("four",)),
    ]


def test_e2e_keeps_all_references_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "testset_w_refs.csv").write_text("mr,ref\na,one\nb,two\na,three\n")
    assert by_prompt(read_e2e(tmp_path, "test")) == [
        Referenced(prompt="a", references=("one", "three")),
        Referenced(prompt="b", references=("two",)),
    ]


def test_mnli_reads_glues_files_and_finds_both_held_out_splits(tmp_path: Path) -> None:
    folder = tmp_path / "MNLI"
    folder.mkdir()
    header = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
    for split, label in (("dev_matched", "contradiction"), ("dev_mismatched", "neutral")):
        (folder / f"{split}.tsv").write_text(f'{header}0\tx\tA "b.\tC.\tneutral\t{label}\n')
    assert heldout_of("mnli", tmp_path) == ("matched", "mismatched")
    assert read_glue("mnli", tmp_path, "matched") == [
        LabelledText(texts=('A "b.', "C."), label=2),
    ]
    assert read_glue("mnli", tmp_path, "mismatched")[0].label == 1


def test_mnli_leaves_out_what_has_no_class_and_reads_a_single_dev_file(tmp_path: Path) -> None:
    rows = [
        {"sentence1": "a", "sentence2": "b", "gold_label": "-"},
        {"sentence1": "c", "sentence2": "d", "gold_label": "entailment"},
    ]
    (tmp_path / "multinli_1.0_train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_glue("mnli", tmp_path, "train") == [LabelledText(texts=("c", "d"), label=0)]
    own = {"premise": "a", "hypothesis": "b", "label": "neutral", "source": "x"}
    write_xz(tmp_path / "mnli_dev_subset.jsonl.xz", json.dumps(own))
    assert heldout_of("mnli", tmp_path) == ("dev",)
    assert read_glue("mnli", tmp_path, "dev") == [LabelledText(texts=("a", "b"), label=1)]


def test_qqp_leaves_out_the_few_lines_its_file_has_broken(tmp_path: Path) -> None:
    good = [f"{i}\t1\t2\twhat {i}\twho {i}\t{i % 2}" for i in range(2000)]
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    broken = ["7\t1\t2\ta question", "broken in two\tanother\t0"]
    (tmp_path / "train.tsv").write_text("\n".join([header, *broken, *good]))
    with pytest.warns(UserWarning, match=r"left out 2 lines .* line 2 the first"):
        found = read_glue("qqp", tmp_path, "train")
    assert len(found) == 2000
    assert found[1] == LabelledText(texts=("what 1", "who 1"), label=1)
    (tmp_path / "train.tsv").write_text("\n".join([header, *broken, *good[:100]]))
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv:2.*6 columns"):
        read_glue("qqp", tmp_path, "train")


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


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[{"tripleset": [], "annotations": []},\n {"tripleset": []}]', r"json:2.*annotations"),
        (
            '[{"tripleset": [], "annotations": {"source": ["a", "b"], "text": ["c"]}}]',
            r"json:1.*as many texts as sources",
        ),
        ('[{"tripleset": [], "annotations": {"source": 3, "text": []}}]', r"json:1.*as many"),
        ('[\n{"tripleset": [],\n"annotations": []}\n{}]', r"json:4.*','"),
        ('[\n{"tripleset": []', r"json:2.*JSON object"),
        ("{}", r"json:1.*'\['"),
        ('[{"tripleset": [], "annotations": []}', r"json:1.*','"),
    ],
)
def test_faults_of_a_json_list_name_the_line(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "dev.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=match):
        read_dart(tmp_path, "dev")


def test_an_absent_folder_says_what_to_put_where(tmp_path: Path) -> None:
    for name in ("sst2", "qqp", "mnli", "qnli"):
        with pytest.raises(InvalidArgumentError, match=r"absent, which is not there'; put there"):
            read_glue(name, tmp_path / "absent", "train")
    with pytest.raises(InvalidArgumentError, match=r"e2e-dataset\.zip"):
        read_e2e(tmp_path, "train")
    with pytest.raises(InvalidArgumentError, match=r"dart-v1\.1\.1-full-train\.json"):
        read_dart(tmp_path, "train")


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv"):
        read_glue("sst2", tmp_path, "train")
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\t1\n")
    with pytest.raises(InvalidArgumentError, match="sentence"):
        read_glue("sst2", tmp_path, "train")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nx\n")
    with pytest.raises(InvalidArgumentError, match=r"train\.tsv:2"):
        read_glue("sst2", tmp_path, "train")
    (tmp_path / "train.tsv").write_text("question\tsentence\tlabel\nq\ts\tmaybe\n")
    with pytest.raises(InvalidArgumentError, match="maybe"):
        read_glue("qnli", tmp_path, "train")
    with pytest.raises(InvalidArgumentError, match=r"exactly one \.npz"):
        read_cifar(tmp_path, "train", 10)
    with pytest.raises(InvalidArgumentError, match=r"an \.npz file"):
        read_cifar(tmp_path / "absent.npz", "train", 10)
