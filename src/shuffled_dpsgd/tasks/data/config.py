"""The `[data]` section of a run: which data set, from where, and which part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.ranges import check_range

DataFormat = Literal[
    "digits",
    "sst2",
    "qqp",
    "mnli",
    "qnli",
    "e2e",
    "dart",
    "cifar10",
    "cifar100",
    "cifar",
    "csv",
    "jsonl",
    "hub",
]
DataSource = Literal["folder", "hub"]

# Keys that a format does not use, so that none is ignored in silence.
_COLUMNS = ("subset", "text_columns", "label_column")
_OF_NAMED_SETS = ("source", "exclude_sources")
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "digits": (
        *_COLUMNS,
        *_OF_NAMED_SETS,
        "path",
        "num_labels",
        "label_names",
        "max_length",
        "max_train_examples",
        "max_heldout_examples",
        "heldout_split",
        "heldout_from_train",
    ),
    "cifar": (*_COLUMNS, *_OF_NAMED_SETS, "heldout_split"),
    "csv": ("subset", *_OF_NAMED_SETS),
    "jsonl": ("subset", *_OF_NAMED_SETS),
    "hub": _OF_NAMED_SETS,
    "dart": _COLUMNS,
}
_USUAL = (*_COLUMNS, "exclude_sources")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data: a format, and the folder (or hub name) it is read from.

    `heldout_split` is scored in place of the usual split. With `heldout_from_train` that many
    training records are held back and scored instead: what settings are to be tuned on, so that
    the published test data stay unseen.
    """

    format: DataFormat
    name: str | None = None
    source: DataSource = "folder"
    path: str | None = None
    subset: str | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str = "label"
    num_labels: int | None = None
    label_names: tuple[str, ...] = ()
    exclude_sources: tuple[str, ...] = ()
    max_length: int = 128
    max_train_examples: int | None = None
    max_heldout_examples: int | None = None
    heldout_split: str | None = None
    heldout_from_train: int | None = None

    @property
    def given_name(self) -> str:
        """What the card calls the data: the name stated, else the hub's, else the folder's."""
        if self.name is not None or self.path is None:
            return self.name or self.format
        if "hub" in (self.format, self.source):
            return self.path
        return f"{self.format} ({Path(self.path).name})"

    def __post_init__(self) -> None:
        check_range("max_length", self.max_length, 4)
        check_range("max_train_examples", self.max_train_examples, 1)
        check_range("max_heldout_examples", self.max_heldout_examples, 1)
        check_range("heldout_from_train", self.heldout_from_train, 1)
        for name in _UNUSED.get(self.format, _USUAL):
            default = next(item.default for item in fields(self) if item.name == name)
            if getattr(self, name) != default:
                raise InvalidArgumentError(
                    name,
                    expected=f"nothing: data.format {self.format!r} does not use it",
                    got=getattr(self, name),
                )
        if self.heldout_split is not None and self.heldout_from_train is not None:
            raise InvalidArgumentError(
                "heldout_split",
                expected="nothing beside heldout_from_train: each of them says what is scored",
                got=self.heldout_split,
            )
        self.check_split(self.heldout_split)
        unknown = [s for s in self.exclude_sources if s not in PUBLISHED["dart"].sources]
        if unknown:
            raise InvalidArgumentError(
                "exclude_sources",
                expected=f"some of {list(PUBLISHED['dart'].sources)}",
                got=unknown,
            )

    def check_split(self, split: str | None) -> None:
        """Refuse a held-out split that the data set does not have."""
        known = {"csv": ("dev", "test"), "jsonl": ("dev", "test"), "cifar": ("test",)}
        facts = PUBLISHED.get(self.format)
        splits = known.get(self.format) if facts is None else facts.splits
        if split is not None and splits is not None and split not in splits:
            raise InvalidArgumentError(
                "heldout_split", expected=f"one of {list(splits)} of {self.format}", got=split
            )
