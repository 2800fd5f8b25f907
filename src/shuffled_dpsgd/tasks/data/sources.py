"""The splits of a data set as rows, from text files in a folder or from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError, require
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.published import HUB_SPLITS, PUBLISHED, HubPlace, PublishedSet
from shuffled_dpsgd.tasks.data.tables import Columns, Row, find_file, read_table

_HUB_HELDOUT = ("validation", "dev", "test")
_OWN_STEMS = {"train": ("train",), "dev": ("dev", "validation", "test"), "test": ("test",)}
Convert = Callable[[Row, Columns], Any]


def open_source(data: DataConfig, *own_columns: Columns) -> FolderSource | HubSource:
    """Where the rows of `data` come from; a set without a name has one of `own_columns`."""
    kind = HubSource if data.is_on_hub else FolderSource
    return kind(data, own_columns)


class FolderSource:
    """Text files in the folder that `[data]` names, of a published set or of the user's own."""

    def __init__(self, data: DataConfig, own_columns: Sequence[Columns]) -> None:
        self._path = folder_of(data)
        self._facts = PUBLISHED.get(data.format) or PublishedSet(
            title="data of your own",
            task="",
            what=f"train.{data.format} and dev.{data.format}, or train.{data.format} alone and "
            "write `heldout_from_train = …` under [data]",
            stems=_OWN_STEMS,
            kinds=(data.format,),
            columns=tuple(own_columns),
        )

    @property
    def heldout(self) -> tuple[str, ...]:
        """The splits to score: the usual ones, or a single `dev` file where it stands alone."""
        usual = self._facts.heldout
        return usual if any(map(self._file, usual)) or not self._file("dev") else ("dev",)

    def read(self, split: str, convert: Convert) -> list[Any]:
        """Every row of a split, converted, but for those that are marked as having no class."""
        facts, file = self._facts, self._file(split)
        if file is None:
            raise facts.missing_file(self._path, facts.files(split)[0])
        rows, columns = read_table(file, facts.columns, broken_share=facts.broken_share)
        return [
            convert(row, columns)
            for row in rows
            if facts.unlabelled is None or row.cells[columns[-1]] != facts.unlabelled
        ]

    def _file(self, split: str) -> Path | None:
        folders = [self._path, *(self._path / name for name in self._facts.folders)]
        return find_file(folders, self._facts.files(split))


class HubSource:
    """A data set of the hub, or a folder that `datasets.load_dataset` understands."""

    def __init__(self, data: DataConfig, own_columns: Sequence[Columns]) -> None:
        self._known = PUBLISHED.get(data.format)
        place = None if self._known is None else self._known.hub
        self._choices = own_columns if place is None else [place.columns]
        if data.path is not None:
            known = place or HubPlace("", own_columns[0], data.subset)
            # A copy of a named set in a folder has no configurations.
            subset = None if place and Path(data.path).is_dir() else known.subset
            place = HubPlace(data.path, known.columns, subset)
        if place is None:
            raise InvalidArgumentError("data.path", expected="a hub name or a folder", got=None)
        self._place, self._splits = place, _load(place)

    @property
    def heldout(self) -> tuple[str, ...]:
        """The splits to score."""
        if self._known is not None:
            return self._known.heldout
        found = next((name for name in _HUB_HELDOUT if name in self._splits), None)
        if "train" not in self._splits or found is None:
            raise InvalidArgumentError(
                "data.path",
                expected=f"splits train and one of {_HUB_HELDOUT} in {self._place.name}",
                got=sorted(self._splits),
            )
        return (found,)

    def read(self, split: str, convert: Convert) -> HubRecords:
        """The rows of a split."""
        name = self._place.name
        found = self._splits.get(HUB_SPLITS.get(split, split) if self._known else split)
        if found is None:
            raise InvalidArgumentError(
                "data.path", expected=f"a split {split} in {name}", got=sorted(self._splits)
            )
        known = found.column_names
        columns = next((c for c in self._choices if {*known}.issuperset(c)), self._choices[0])
        missing = [column for column in columns if column not in known]
        require(not missing, "data.text_columns", f"columns of {known}", missing)
        return HubRecords(found, f"{name}, split {split}", lambda row: convert(row, columns))


@dataclass(frozen=True)
class HubRecords:
    """Rows of the hub, converted when they are asked for, because decoding images is slow."""

    rows: Any
    where: str
    convert: Callable[[Row], Any]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part(range(len(self))))

    def part(self, chosen: Sequence[int]) -> list[Any]:
        """The records at these places."""
        return [
            self.convert(Row(where=f"{self.where}, record {index}", cells=cells, typed=True))
            for index, cells in zip(chosen, self.rows.select(chosen), strict=True)
        ]


def folder_of(data: DataConfig) -> Path:
    """The folder (or file) the user named."""
    if data.path is not None:
        return Path(data.path)
    facts, remedy = PUBLISHED.get(data.format), ""
    if facts is not None:
        remedy = f'write `path = "…"`, a folder with {facts.what}, or write `source = "hub"`'
    raise InvalidArgumentError("data.path", expected="a folder", got=None, remedy=remedy)


def _load(place: HubPlace) -> dict[str, Any]:
    """Every split of a data set, by the hub's name for it."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", extra="hf", purpose="hub data sets") from error
    try:
        return dict(datasets.load_dataset(place.name, place.subset, revision=place.revision))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise InvalidArgumentError(
            "data.path",
            expected="a data set `datasets.load_dataset` can load",
            got=place.name,
            remedy=(str(error) or type(error).__name__).splitlines()[0],
        ) from error
