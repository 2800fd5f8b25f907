"""Data sets from the Hugging Face hub, or from a folder `datasets.load_dataset` understands."""

from __future__ import annotations

from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.folders import Continuation, LabelledText

HELDOUT_SPLITS = ("validation", "dev", "test")


def read_labelled_texts(data: DataConfig) -> tuple[list[LabelledText], list[LabelledText]]:
    """Training and held-out texts; `text_columns` names one or two columns."""
    if len(data.text_columns) not in (1, 2):
        raise InvalidArgumentError(
            "data.text_columns", expected="one or two column names", got=data.text_columns
        )
    columns = (*data.text_columns, data.label_column)

    def convert(row: dict[str, Any]) -> LabelledText:
        *texts, label = (row[column] for column in columns)
        return LabelledText(texts=tuple(map(str, texts)), label=int(label))

    return _convert(data, columns, convert)


def read_continuations(data: DataConfig) -> tuple[list[Continuation], list[Continuation]]:
    """Training and held-out prompts with targets; `text_columns` names prompt and target."""
    if len(data.text_columns) != 2:
        raise InvalidArgumentError(
            "data.text_columns", expected="[prompt column, target column]", got=data.text_columns
        )
    prompt, target = data.text_columns

    def convert(row: dict[str, Any]) -> Continuation:
        return Continuation(prompt=str(row[prompt]), target=str(row[target]))

    return _convert(data, data.text_columns, convert)


def read_images(data: DataConfig) -> tuple[Any, Any]:
    """Training and held-out splits whose rows hold an image column and a label."""
    if len(data.text_columns) > 1:
        raise InvalidArgumentError(
            "data.text_columns", expected="at most the image column", got=data.text_columns
        )
    column = data.text_columns[0] if data.text_columns else "image"
    return _convert(
        data,
        (column, data.label_column),
        lambda row: (row[column].convert("RGB"), int(row[data.label_column])),
    )


def _convert(data: DataConfig, columns: tuple[str, ...], convert: Any) -> Any:
    splits = []
    limits = (data.max_train_examples, data.max_heldout_examples)
    for split, limit in zip(_load_splits(data), limits, strict=True):
        missing = [column for column in columns if column not in split.column_names]
        if missing:
            raise InvalidArgumentError(
                "data.text_columns", expected=f"columns of {split.column_names}", got=missing
            )
        chosen = split if limit is None else split.select(range(min(limit, len(split))))
        splits.append([convert(row) for row in chosen])
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
    except (OSError, ValueError) as error:
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
