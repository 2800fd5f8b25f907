"""Data sets from the Hugging Face hub, or from a folder `datasets.load_dataset` understands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.data.published import PUBLISHED, HubPlace
from shuffled_dpsgd.tasks.data.records import Source
from shuffled_dpsgd.tasks.data.tables import Row

HELDOUT_SPLITS = ("validation", "dev", "test")
Record = TypeVar("Record")


class HubRows(Generic[Record]):
    """The rows of one split, converted when they are asked for: decoding images takes long."""

    def __init__(self, rows: Any, where: str, convert: Callable[[Row], Record]) -> None:
        self._rows = rows
        self._where = where
        self._convert = convert

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.part(range(len(self))))

    def part(self, chosen: Sequence[int]) -> list[Record]:
        """The records at these places."""
        return [
            self._convert(Row(where=f"{self._where}, record {index}", cells=cells, typed=True))
            for index, cells in zip(chosen, self._rows.select(chosen), strict=True)
        ]


def hub_place(data: DataConfig) -> HubPlace:
    """Where the hub has what `[data]` names: a copy the user names, or where it was published."""
    if data.format in PUBLISHED:
        known = PUBLISHED[data.format].hub
        if data.path is None:
            return known
        subset = None if Path(data.path).is_dir() else known.subset
        return HubPlace(name=data.path, columns=known.columns, splits=known.splits, subset=subset)
    if data.path is None:
        raise InvalidArgumentError("data.path", expected="a hub name or a folder", got=None)
    return HubPlace(name=data.path, columns=(), splits={}, subset=data.subset)


def hub_source(
    data: DataConfig, columns: Sequence[str], convert: Callable[[Row], Record]
) -> Source[HubRows[Record]]:
    """The splits of a data set of the hub, which must have `columns`."""
    place = hub_place(data)
    loaded = _load(place)
    names = dict(place.splits) or {name: name for name in loaded}

    def read(split: str) -> HubRows[Record]:
        found = loaded.get(names.get(split, split))
        if found is None:
            raise InvalidArgumentError(
                "data.path", expected=f"a split {split} in {place.name}", got=sorted(loaded)
            )
        missing = [column for column in columns if column not in found.column_names]
        if missing:
            raise InvalidArgumentError(
                "data.text_columns", expected=f"columns of {found.column_names}", got=missing
            )
        return HubRows(found, f"{place.name}, split {split}", convert)

    return Source(read=read, heldout=_heldout(data, place, loaded))


def _heldout(data: DataConfig, place: HubPlace, loaded: dict[str, Any]) -> tuple[str, ...]:
    if data.format in PUBLISHED:
        return PUBLISHED[data.format].heldout
    found = next((name for name in HELDOUT_SPLITS if name in loaded), None)
    if "train" not in loaded or found is None:
        raise InvalidArgumentError(
            "data.path",
            expected=f"splits train and one of {HELDOUT_SPLITS} in {place.name}",
            got=sorted(loaded),
        )
    return (found,)


def _load(place: HubPlace) -> dict[str, Any]:
    """Every split of a data set, by the hub's name for it."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", extra="hf", purpose="hub data sets") from error
    try:
        loaded = datasets.load_dataset(place.name, place.subset, revision=place.revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise InvalidArgumentError(
            "data.path",
            expected="a data set `datasets.load_dataset` can load",
            got=place.name,
            remedy=(str(error) or type(error).__name__).splitlines()[0],
        ) from error
    return dict(loaded)


def image_record(row: Row, columns: Sequence[str], num_labels: int) -> tuple[Any, int]:
    """An image in colour and its class."""
    column, label = columns
    image = row.cells[column]
    if not hasattr(image, "convert"):
        raise InvalidArgumentError(
            row.where, expected=f"an image in {column!r}", got=type(image).__name__
        )
    return image.convert("RGB"), row.label(label, num_labels)
