"""Data sets from the Hugging Face hub, or from a folder `datasets.load_dataset` understands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.folders import (
    Continuation,
    LabelledText,
    check_columns,
    continued,
    labelled,
)
from shuffled_dpsgd.tasks.parts import drawn_part
from shuffled_dpsgd.tasks.tables import Row

HELDOUT_SPLITS = ("validation", "dev", "test")


def read_labelled_texts(
    data: DataConfig, num_labels: int
) -> tuple[list[LabelledText], list[LabelledText]]:
    """Training and held-out texts; `text_columns` names one or two columns."""
    check_columns(data, (1, 2), "one or two column names")
    columns = (*data.text_columns, data.label_column)
    return _convert(data, columns, lambda row: labelled(row, data, num_labels))


def read_continuations(data: DataConfig) -> tuple[list[Continuation], list[Continuation]]:
    """Training and held-out prompts with targets; `text_columns` names prompt and target."""
    check_columns(data, (2,), "[prompt column, target column]")
    return _convert(data, data.text_columns, lambda row: continued(row, data))


def read_images(data: DataConfig, num_labels: int) -> tuple[Any, Any]:
    """Training and held-out splits whose rows hold an image column and a label."""
    check_columns(data, (0, 1), "at most the image column")
    column = data.text_columns[0] if data.text_columns else "image"

    def convert(row: Row) -> tuple[Any, int]:
        image = row.cells[column]
        if not hasattr(image, "convert"):
            raise InvalidArgumentError(
                row.where, expected=f"an image in {column!r}", got=type(image).__name__
            )
        return image.convert("RGB"), row.label(data.label_column, num_labels)

    return _convert(data, (column, data.label_column), convert)


def _convert(data: DataConfig, columns: tuple[str, ...], convert: Callable[[Row], Any]) -> Any:
    splits = []
    limits = (data.max_train_examples, data.max_heldout_examples)
    for split, limit in zip(_load_splits(data), limits, strict=True):
        missing = [column for column in columns if column not in split.column_names]
        if missing:
            raise InvalidArgumentError(
                "data.text_columns", expected=f"columns of {split.column_names}", got=missing
            )
        chosen = drawn_part(len(split), limit)
        where = f"{data.path}, split {split.split or 'given'}"
        splits.append(
            [
                convert(Row(where=f"{where}, record {index}", cells=cells, typed=True))
                for index, cells in zip(chosen, split.select(chosen), strict=True)
            ]
        )
    return tuple(splits)


def _load_splits(data: DataConfig) -> tuple[Any, Any]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", extra="hf", purpose="hub data sets") from error
    if data.path is None:
        raise InvalidArgumentError("data.path", expected="a hub name or a folder", got=None)
    try:
        loaded = datasets.load_dataset(data.path, data.subset)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InvalidArgumentError(
            "data.path",
            expected="a data set `datasets.load_dataset` can load",
            got=data.path,
            remedy=str(error).splitlines()[0],
        ) from error
    heldout = next((name for name in HELDOUT_SPLITS if name in loaded), None)
    if "train" not in loaded or heldout is None:
        raise InvalidArgumentError(
            "data.path",
            expected=f"splits train and one of {HELDOUT_SPLITS}",
            got=sorted(loaded),
        )
    return loaded["train"], loaded[heldout]
