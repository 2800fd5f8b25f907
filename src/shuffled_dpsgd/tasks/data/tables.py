"""Rows of text files, each with the place it came from.

Tab-separated, comma-separated, JSON and JSON-lines files, compressed (`.xz`) or not. Whatever
cannot be read is an error that names the file and the line, or the item of a JSON list.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, require

_SHOWN = 60
_BOM = b"\xef\xbb\xbf"
Columns = tuple[str, ...]


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
                remedy="correct the record, name the classes in data.label_names, number them "
                "from 0, or state another data.num_labels",
            )
        return value


def read_table(
    path: Path, choices: Sequence[Columns], *, broken_share: float = 0.0
) -> tuple[list[Row], Columns]:
    """The rows of a `.tsv`, `.csv`, `.jsonl` or `.json` file, and which of `choices` it has.

    Lines with too few or too many cells are an error; up to a share of `broken_share` of them are
    left out with a warning instead.
    """
    kind = path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix
    if kind in (".jsonl", ".json"):
        return _objects(path, kind, choices)
    records = _separated(path, kind)
    number, header = next(records, (1, []))
    columns = next((c for c in choices if set(c) <= set(header)), choices[0])
    _require_columns(path, header, columns)
    rows, broken = [], []
    for number, cells in records:
        if len(cells) == len(header):
            cell_of = dict(zip(header, cells, strict=True))
            rows.append(Row(where=f"{path}:{number}", cells=cell_of))
        else:
            broken.append((number, len(cells)))
    if broken:
        first, found = broken[0]
        expected = f"{len(header)} columns"
        if len(broken) > broken_share * number:
            raise InvalidArgumentError(f"{path}:{first}", expected=expected, got=found)
        left = f"left out {len(broken)} lines that do not have {expected}, line {first} the first"
        warnings.warn(f"{path}: {left}", stacklevel=2)
    return rows, columns


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


def _require_columns(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse a file that lacks a column, or has it twice."""
    wrong = [name for name in wanted if list(found).count(name) != 1]
    if wrong:
        how = "twice" if wrong[0] in found else "not there"
        raise InvalidArgumentError(
            str(path),
            expected=f"columns {list(wanted)}, each once",
            got=f"{wrong[0]} {how}",
            remedy=f"it has {[shortened(name) for name in found[:8]]}",
        )


def _separated(path: Path, kind: str) -> Iterator[tuple[int, list[str]]]:
    """The number of a record's first line, and its cells. Tabs are without quoting, as in GLUE."""
    text = _text(path)
    if kind == ".tsv":
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            yield number, line.rstrip("\r").split("\t")
        return
    reader, began = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    try:
        for cells in reader:
            yield began, cells
            began = reader.line_num + 1
    except csv.Error as error:
        # The line is where the record begins: an open quote is noticed at the end of the file only.
        raise InvalidArgumentError(
            f"{path}:{began}",
            expected="comma-separated values, quoted as CSV has it",
            got=f"{error}, in the record that begins there",
        ) from error


def _objects(path: Path, kind: str, choices: Sequence[Columns]) -> tuple[list[Row], Columns]:
    text = _text(path)
    if kind == ".json":
        found = _parsed(path, 1, text, "a list of JSON objects")
        kind = type(found).__name__
        require(isinstance(found, list), str(path), "a list of JSON objects", kind)
        items = {f"{path}, item {number}": item for number, item in enumerate(found, start=1)}
    else:
        lines = text.removesuffix("\n").split("\n") if text else []
        items = {
            f"{path}:{number}": _parsed(path, number, line.strip(), "one JSON object")
            for number, line in enumerate(lines, start=1)
        }
    first: Any = next(iter(items.values()), {})
    fitting = [each for each in choices if set(each) <= set(first)]
    columns = (fitting or choices)[0]
    expected = " or ".join(f"the keys {list(each)}" for each in fitting[:1] or choices)
    for where, cells in items.items():
        if not isinstance(cells, dict):
            raise InvalidArgumentError(where, expected="one JSON object", got=shortened(cells))
        missing = [name for name in columns if name not in cells]
        if missing:
            got = f"an object without {missing}"
            raise InvalidArgumentError(where, expected=expected, got=got)
    return [Row(where=where, cells=cells, typed=True) for where, cells in items.items()], columns


def _parsed(path: Path, line: int, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        number = line + getattr(error, "lineno", 1) - 1
        raise InvalidArgumentError(
            f"{path}:{number}", expected=expected, got=getattr(error, "msg", "too deep a nesting")
        ) from error


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == ".xz" else content
        return content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidArgumentError(
            f"{path}:{line}",
            expected="text in UTF-8",
            got=error.object[error.start : error.start + 8],
            remedy="convert the file, for example with `iconv -f LATIN1 -t UTF-8`",
        ) from error
    except (lzma.LZMAError, OSError) as error:
        raise InvalidArgumentError(
            str(path),
            expected="a complete .xz file" if path.suffix == ".xz" else "a file that can be read",
            got=getattr(error, "strerror", None) or str(error),
        ) from error
