"""One's own data: CSV or JSON-lines files whose columns the configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.data.records import Continuation, LabelledText
from shuffled_dpsgd.tasks.data.tables import Row, find_table, read_table

_STEMS = {"train": ("train",), "dev": ("dev", "validation", "test"), "test": ("test",)}


def read_labelled_table(
    folder: Path, split: str, data: DataConfig, num_labels: int
) -> list[LabelledText]:
    """`text_columns` names one or two text columns, `label_column` the class."""
    check_columns(data, (1, 2), "one or two column names")
    rows = _rows(folder, split, data, (*data.text_columns, data.label_column))
    return [labelled(row, data, num_labels) for row in rows]


def read_continuation_table(folder: Path, split: str, data: DataConfig) -> list[Continuation]:
    """`text_columns` names prompt and target."""
    check_columns(data, (2,), "[prompt column, target column]")
    return [continued(row, data) for row in _rows(folder, split, data, data.text_columns)]


def labelled(row: Row, data: DataConfig, num_labels: int) -> LabelledText:
    """A record of columns the configuration names."""
    return LabelledText(
        texts=tuple(row.text(column) for column in data.text_columns),
        label=row.label(data.label_column, num_labels),
    )


def continued(row: Row, data: DataConfig) -> Continuation:
    """A record of the two columns the configuration names."""
    prompt, target = data.text_columns
    return Continuation(prompt=row.text(prompt), target=row.text(target))


def check_columns(data: DataConfig, counts: tuple[int, ...], expected: str) -> None:
    """Refuse any other number of `text_columns`."""
    if len(data.text_columns) not in counts:
        raise InvalidArgumentError("data.text_columns", expected=expected, got=data.text_columns)


def _rows(folder: Path, split: str, data: DataConfig, columns: tuple[str, ...]) -> Iterator[Row]:
    return read_table(find_table(folder, _STEMS[split], data.format), columns)
