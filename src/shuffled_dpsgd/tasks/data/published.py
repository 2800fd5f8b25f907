"""The named data sets: their classes, splits, files and columns, in folders and on the hub."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.tables import Columns

HUB_SPLITS = {
    "train": "train",
    "dev": "validation",
    "test": "test",
    "matched": "validation_matched",
    "mismatched": "validation_mismatched",
}
"""What the hub calls the splits of these sets."""


@dataclass(frozen=True)
class HubPlace:
    """A data set on the hub: its name, columns and configuration.

    `revision` is the branch of Parquet files that the hub makes of sets whose own branch holds
    code. Code from the hub is never run.
    """

    name: str
    columns: Columns
    subset: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """One named data set.

    `folders` are the names its folder may have; `what` says what to fetch, and where. The files of
    a split are named by one of its `stems` and one of `kinds`. They have one of the sets of
    `columns`, whose last is the class or the target. Records whose class is `unlabelled` are left
    out, as their publisher says. `broken_share` is the share of broken lines in the published file.
    `heldout` are the splits that are usually scored, `sources` the collections that the records
    name.
    """

    title: str
    task: str
    what: str
    stems: Mapping[str, Columns]
    kinds: Columns
    hub: HubPlace | None = None
    folders: Columns = ()
    columns: tuple[Columns, ...] = ()
    unlabelled: str | None = None
    broken_share: float = 0.0
    classes: Columns = ()
    heldout: Columns = ("dev",)
    sources: Columns = ()

    @property
    def splits(self) -> tuple[str, ...]:
        """The held-out splits there are."""
        return tuple(split for split in self.stems if split != "train")

    def files(self, split: str) -> list[str]:
        """The names a split's file may have, the likeliest first."""
        return [f"{stem}.{kind}" for kind in self.kinds for stem in self.stems[split]]

    def missing_file(self, folder: Path, file: str) -> InvalidArgumentError:
        """The error for a missing file: what to put where."""
        there = "" if folder.is_dir() else ", which is not there"
        hub = "" if self.hub is None else 'or write `source = "hub"`; '
        return InvalidArgumentError(
            "data.path",
            expected=f"a folder with {file} or {file}.xz, for {self.title}",
            got=f"{folder}{there}",
            remedy=f"put there {self.what}, {hub}a path in a file is relative to that file",
        )


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_FACTS = _frozen(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")))
PUBLISHED = MappingProxyType(
    {n: PublishedSet(**{**facts, "hub": HubPlace(**facts["hub"])}) for n, facts in _FACTS.items()}
)
