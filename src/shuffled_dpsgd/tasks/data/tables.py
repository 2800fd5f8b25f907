"""Rows of text files, each with the place it came from.

Tab-separated, comma-separated, JSON and JSON-lines files, compressed (`.xz`) or not. What cannot be
read is an error that names the file and the line, or the item of a JSON list. Nothing is skipped
and nothing is converted silently.
"""

from __future__ import annotations

import csv
import json
import lzma
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError

_SHOWN = 60
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record and its place: `train.tsv:17`. `typed` says that its cells need no parsing."""

    where: str
    cells: Mapping[str, Any]
    typed: bool = False

    def text(self, column: str) -> str:
        """The cell, which must be text."""
        value = self.cells[column]
        if not isinstance(value, str):
            raise InvalidArgumentError(
                self.where, expected=f"text in {column!r}", got=shortened(value)
            )
        return value

    def label(self, column: str, num_labels: int, names: Sequence[str] = ()) -> int:
        """The cell as a class: one of `names`, or a whole number from 0 to `num_labels` - 1."""
        value = self.cells[column]
        if value in names:
            return names.index(value)
        if not self.typed and isinstance(value, str) and re.fullmatch("[0-9]+", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_labels:
            named = f", or one of {list(names)}" if names else ""
            raise InvalidArgumentError(
                self.where,
                expected=f"a class from 0 to {num_labels - 1} in {column!r}, as a whole number"
                f"{named}",
                got=shortened(value),
                remedy="correct the record, number the classes from 0, or state another "
                "data.num_labels",
            )
        return value


def read_table(path: Path, columns: Sequence[str], *, broken_share: float = 0.0) -> Iterator[Row]:
    """The rows of a `.tsv`, `.csv`, `.jsonl` or `.json` file, which must have `columns`.

    Lines with too few or too many cells are an error; up to a share of `broken_share` of them are
    left out with a warning instead.
    """
    if _kind(path) in (".tsv", ".csv"):
        return _separated_rows(path, columns, broken_share)
    return _object_rows(path, columns)


def columns_of(path: Path) -> list[str]:
    """The columns a file has: its header, or the keys of its first object."""
    if _kind(path) in (".tsv", ".csv"):
        return next(_separated(path), (1, []))[1]
    first = next(_object_rows(path, ()), None)
    return [] if first is None else list(first.cells)


def find_file(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first of `names` there is, packed (`.xz`) or not, in the first folder that has any."""
    places = (
        folder / f"{name}{packed}" for folder in folders for name in names for packed in ("", ".xz")
    )
    return next((place for place in places if place.is_file()), None)


def shortened(value: Any) -> Any:
    """`value`, or the beginning of a long text: an error is one line."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return value[:_SHOWN] + "…"
    return value


def require_columns(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse a file that lacks a column, or has it twice."""
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InvalidArgumentError(
            str(path),
            expected=f"columns {list(wanted)}",
            got=f"without {missing}",
            remedy=f"the first line names {[shortened(name) for name in found[:8]]}",
        )
    twice = [name for name in wanted if list(found).count(name) > 1]
    if twice:
        raise InvalidArgumentError(str(path), expected="each column once", got=f"{twice} twice")


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix


def _separated_rows(path: Path, columns: Sequence[str], broken_share: float) -> Iterator[Row]:
    records = _separated(path)
    number, header = next(records, (1, []))
    require_columns(path, header, columns)
    broken: list[tuple[int, int]] = []
    for number, cells in records:
        if len(cells) == len(header):
            yield Row(where=f"{path}:{number}", cells=dict(zip(header, cells, strict=True)))
        else:
            broken.append((number, len(cells)))
    if len(broken) > broken_share * number:
        first, found = broken[0]
        raise InvalidArgumentError(f"{path}:{first}", expected=f"{len(header)} columns", got=found)
    if broken:
        warnings.warn(
            f"{path}: left out {len(broken)} lines that do not have {len(header)} columns, line "
            f"{broken[0][0]} the first of them",
            stacklevel=2,
        )


def _separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of a record's first line, and its cells. Tabs are without quoting, as in GLUE."""
    if _kind(path) == ".tsv":
        for number, line in enumerate(_lines(path), start=1):
            yield number, line.rstrip("\r\n").split("\t")
        return
    reader, began = csv.reader(_lines(path), strict=True), 1
    try:
        for cells in reader:
            yield began, cells
            began = reader.line_num + 1
    except csv.Error as error:
        # A quote that nobody closes is noticed many lines below, at the end of the file.
        raise InvalidArgumentError(
            f"{path}:{began}",
            expected="comma-separated values, quoted as CSV has it",
            got=f"{error}, in the record that begins there",
        ) from error


def _object_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    for where, cells in _objects(path):
        if not isinstance(cells, dict):
            raise InvalidArgumentError(where, expected="one JSON object", got=shortened(cells))
        missing = [name for name in columns if name not in cells]
        if missing:
            raise InvalidArgumentError(
                where, expected=f"keys {list(columns)}", got=f"without {missing}"
            )
        yield Row(where=where, cells=cells, typed=True)


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    if _kind(path) == ".jsonl":
        for number, line in enumerate(_lines(path), start=1):
            yield f"{path}:{number}", _parsed(path, number, line.strip(), "one JSON object")
        return
    found = _parsed(path, 1, "".join(_lines(path)), "a list of JSON objects")
    if not isinstance(found, list):
        got = type(found).__name__
        raise InvalidArgumentError(str(path), expected="a list of JSON objects", got=got)
    for number, item in enumerate(found, start=1):
        yield f"{path}, item {number}", item


def _parsed(path: Path, line: int, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        number = line + getattr(error, "lineno", 1) - 1
        raise InvalidArgumentError(
            f"{path}:{number}", expected=expected, got=getattr(error, "msg", "too deep a nesting")
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Decoded line by line, so that an error names the line."""
    number = 0
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                raw = line.removeprefix(_BOM) if number == 1 else line
                yield raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{path}:{number}",
            expected="text in UTF-8",
            got=error.object[error.start : error.start + 8],
            remedy="convert the file, for example with `iconv -f LATIN1 -t UTF-8`",
        ) from error
    except (lzma.LZMAError, EOFError) as error:
        raise InvalidArgumentError(
            str(path),
            expected="a complete .xz file",
            got=str(error),
            remedy="fetch or compress it again",
        ) from error
    except OSError as error:
        raise InvalidArgumentError(
            str(path), expected="a file that can be read", got=error.strerror or str(error)
        ) from error
