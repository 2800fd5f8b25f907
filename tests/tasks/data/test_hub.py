"""Hub data sets, exercised on local folders that `datasets.load_dataset` understands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import (
    Continuation,
    LabelledText,
    Referenced,
    Splits,
    read_continuations,
    read_images,
    read_references,
    read_texts,
)

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for split, count in (("train", 4), ("validation", 2)):
        rows = [{"a": f"text {i}", "b": f"more {i}", "label": i % 2} for i in range(count)]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def config(path: Path | None, *columns: str, **changes: Any) -> DataConfig:
    where = None if path is None else str(path)
    return DataConfig(format="hub", path=where, text_columns=columns, **changes)


def labelled_texts(data: DataConfig) -> Any:
    return read_texts(data, 2)


def images(data: DataConfig) -> Any:
    return read_images(data, 2)


def read_both(folder: Path, limit: int) -> list[LabelledText]:
    return read_texts(config(folder, "a", "b", max_train_examples=limit), 2).train


def both(splits: Splits[Any]) -> tuple[Any, Any]:
    (heldout,) = splits.heldout.values()
    return splits.train, heldout


def test_labelled_texts_of_one_or_two_columns(folder: Path) -> None:
    train, heldout = both(read_texts(config(folder, "a", "b"), 2))
    assert (len(train), len(heldout)) == (4, 2)
    assert train[1] == LabelledText(texts=("text 1", "more 1"), label=1)
    limited, _ = both(read_texts(config(folder, "a", max_train_examples=3), 2))
    chosen = [train.index(example) for example in read_both(folder, 3)]
    assert [example.texts for example in limited] == [train[i].texts[:1] for i in chosen]
    assert len(set(chosen)) == 3


def test_continuations(folder: Path) -> None:
    train, _ = both(read_continuations(config(folder, "a", "b")))
    assert train[0] == Continuation(prompt="text 0", target="more 0")


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            place = tmp_path / "images" / split / label
            place.mkdir(parents=True)
            image.new("L", (4, 4), color=9).save(place / "one.png")
    train, heldout = both(read_images(config(tmp_path / "images"), 2))
    assert sorted(label for _, label in train) == [0, 1]
    assert heldout[0][0].mode == "RGB"


@pytest.mark.parametrize(
    ("columns", "read", "match"),
    [
        ((), labelled_texts, "one or two"),
        (("a",), read_continuations, "prompt column"),
        (("a", "absent"), labelled_texts, "absent"),
        (("a", "b"), images, "image column"),
    ],
)
def test_wrong_columns_are_refused(
    folder: Path, columns: tuple[str, ...], read: Any, match: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        read(config(folder, *columns))


def write_rows(place: Path, **splits: list[dict[str, Any]]) -> None:
    place.mkdir()
    for split, rows in splits.items():
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_named_sets_know_their_columns_and_splits(tmp_path: Path) -> None:
    pair = {"premise": "a", "hypothesis": "b", "label": 2, "idx": 0}
    splits = ("train", "validation_matched", "validation_mismatched")
    write_rows(tmp_path / "mnli", **{name: [pair] for name in splits})
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits)
    readme = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    (tmp_path / "mnli" / "README.md").write_text(readme)
    data = DataConfig(format="mnli", source="hub", path=str(tmp_path / "mnli"))
    found = read_texts(data, 3)
    assert found.train == [LabelledText(texts=("a", "b"), label=2)]
    assert list(found.heldout) == ["matched", "mismatched"]
    wrong = DataConfig(format="qnli", source="hub", path=str(tmp_path / "mnli"))
    with pytest.raises(InvalidArgumentError, match="question"):
        read_texts(wrong, 2)
    row = {"meaning_representation": "food[B]", "human_reference": "It serves B."}
    write_rows(tmp_path / "e2e", train=[row], validation=[row], test=[row, row])
    data = DataConfig(format="e2e", source="hub", path=str(tmp_path / "e2e"))
    assert read_continuations(data).train == [Continuation(prompt="food[B]", target="It serves B.")]
    assert read_references(data, "test") == [
        Referenced(prompt="food[B]", references=("It serves B.", "It serves B."))
    ]


def test_dart_of_the_hub_has_annotations_as_two_lists(tmp_path: Path) -> None:
    row = {
        "tripleset": [["A", "is", "B"]],
        "annotations": {"source": ["webnlg", "e2e"], "text": ["one", "two"]},
    }
    write_rows(tmp_path / "dart", train=[row], validation=[row])
    data = DataConfig(
        format="dart", source="hub", path=str(tmp_path / "dart"), exclude_sources=("e2e",)
    )
    splits = read_continuations(data)
    assert splits.train == [Continuation(prompt="A : is : B", target="one", source="webnlg")]
    assert read_references(data) == [Referenced(prompt="A : is : B", references=("one",))]


def test_missing_data_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="a hub name or a folder"):
        labelled_texts(config(None, "a"))
    with pytest.raises(InvalidArgumentError, match=r"load_dataset"):
        labelled_texts(config(tmp_path / "absent", "a"))
    (folder / "validation.jsonl").unlink()
    with pytest.raises(InvalidArgumentError, match="splits train"):
        labelled_texts(config(folder, "a"))
