"""Rows of text files, each with the place it came from.

Tab-separated, comma-separated, JSON and JSON-lines files, compressed (`.xz`) or not. Whatever
cannot be read is an error that names the file and the line; nothing is skipped and nothing is
converted silently.
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
_GAP = re.compile(r"\s*")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record and its place: `train.tsv:17`. `typed` says that its cells need no parsing."""

    where: str
    cells: Mapping[str, Any]
    typed: bool = False

    def text(self, column: str) -> str:
        """The cell, which must be text."""
        value = self._cell(column)
        if not isinstance(value, str):
            raise InvalidArgumentError(
                self.where, expected=f"text in {column!r}", got=shortened(value)
            )
        return value

    def label(self, column: str, num_labels: int) -> int:
        """The cell as a class, which must be a whole number from 0 to `num_labels` - 1."""
        value = self._cell(column)
        if not self.typed and isinstance(value, str) and re.fullmatch("[0-9]+", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_labels:
            raise InvalidArgumentError(
                self.where,
                expected=f"a class from 0 to {num_labels - 1} in {column!r}, as a whole number",
                got=shortened(value),
                remedy="correct the record, number the classes from 0, or state another "
                "data.num_labels",
            )
        return value

    def label_named(self, column: str, names: Sequence[str]) -> int:
        """The cell as a class: its name, or its number."""
        value = self._cell(column)
        if value in names:
            return names.index(value)
        if isinstance(value, str) and not re.fullmatch("[0-9]+", value):
            raise InvalidArgumentError(
                self.where, expected=f"one of {list(names)} in {column!r}", got=shortened(value)
            )
        return self.label(column, len(names))

    def _cell(self, column: str) -> Any:
        if column not in self.cells:
            raise InvalidArgumentError(
                self.where, expected=f"a value for {column!r}", got=sorted(map(str, self.cells))
            )
        return self.cells[column]


def read_table(path: Path, columns: Sequence[str], *, broken_share: float = 0.0) -> Iterator[Row]:
    """The rows of a `.tsv`, `.csv`, `.jsonl` or `.json` file, which must have `columns`.

    A row of a `.tsv` with too few or too many cells is an error; up to a share of `broken_share`
    such rows are left out with a warning instead.
    """
    kind = path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix
    if kind == ".tsv":
        return _read_tsv(path, columns, broken_share)
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".json": _read_json}
    return readers[kind](path, columns)


def columns_of(path: Path) -> list[str]:
    """The columns a file has: its header, or the keys of its first object."""
    kind = path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix
    if kind in (".jsonl", ".json"):
        first = next(read_table(path, ()), None)
        return [] if first is None else list(first.cells)
    header = next(_lines(path), "").rstrip("\r\n")
    return header.split("\t") if kind == ".tsv" else next(csv.reader([header]), [])


def find_table(folder: Path, stems: Sequence[str], suffix: str) -> Path:
    """The first of `stems` there is in `folder`, as `stem.suffix` or `stem.suffix.xz`."""
    found = first_file(folder, [f"{stem}.{suffix}" for stem in stems])
    if found is not None:
        return found
    name = f"{stems[0]}.{suffix}"
    raise InvalidArgumentError(
        "data.path",
        expected=f"a folder with {name} or {name}.xz",
        got=str(folder),
        remedy="check the path; in a file it is relative to that file",
    )


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of `names` there is in `folder`, packed (`.xz`) or not."""
    places = (folder / f"{name}{packed}" for name in names for packed in ("", ".xz"))
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


def _read_tsv(path: Path, columns: Sequence[str], broken_share: float) -> Iterator[Row]:
    """Without quoting, as GLUE has it."""
    lines = _lines(path)
    header = next(lines, "").rstrip("\r\n").split("\t")
    require_columns(path, header, columns)
    broken: list[tuple[int, list[str]]] = []
    number = 1
    for number, line in enumerate(lines, start=2):
        cells = line.rstrip("\r\n").split("\t")
        if len(cells) == len(header) or not broken_share:
            yield _row(path, number, header, cells)
        else:
            broken.append((number, cells))
    if not broken:
        return
    first, cells = broken[0]
    if len(broken) > broken_share * number:
        _row(path, first, header, cells)
    warnings.warn(
        f"{path}: left out {len(broken)} lines that do not have {len(header)} columns, line "
        f"{first} the first of them",
        stacklevel=2,
    )


def _read_csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(_lines(path), strict=True)
    began = 1
    try:
        header = next(reader, [])
        require_columns(path, header, columns)
        began = reader.line_num + 1
        for cells in reader:
            yield _row(path, began, header, cells)
            began = reader.line_num + 1
    except csv.Error as error:
        # A quote that nobody closes is noticed many lines below, at the end of the file.
        raise InvalidArgumentError(
            f"{path}:{began}",
            expected="comma-separated values, quoted as CSV has it",
            got=f"{error}, in the record that begins there",
        ) from error


def _read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}:{number}"
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(
                where, expected="one JSON object", got=shortened(line.rstrip("\r\n"))
            ) from error
        yield _object(where, cells, columns)


def _read_json(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """One list of objects, read object by object, so that an error names its line."""
    text = "".join(_lines(path))
    decoder = json.JSONDecoder()
    place, number = 0, 1
    expected = "["
    while True:
        after = _GAP.match(text, place)
        assert after is not None
        number += text.count("\n", place, after.end())
        place, where = after.end(), f"{path}:{number}"
        sign = text[place : place + 1]
        if sign == "]" and expected != "[":
            return
        if sign != expected and expected != "":
            raise InvalidArgumentError(
                where, expected=f"{expected!r} of a list of objects", got=shortened(sign or "end")
            )
        if expected in ("[", ","):
            place, expected = place + 1, ""
            continue
        try:
            cells, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            got = shortened(text[place : place + 2 * _SHOWN])
            raise InvalidArgumentError(where, expected="one JSON object", got=got) from error
        yield _object(where, cells, columns)
        number += text.count("\n", place, end)
        place, expected = end, ","


def _object(where: str, cells: Any, columns: Sequence[str]) -> Row:
    if not isinstance(cells, dict):
        raise InvalidArgumentError(where, expected="one JSON object", got=shortened(cells))
    missing = [name for name in columns if name not in cells]
    if missing:
        raise InvalidArgumentError(
            where, expected=f"keys {list(columns)}", got=f"without {missing}"
        )
    return Row(where=where, cells=cells, typed=True)


def _row(path: Path, number: int, header: Sequence[str], cells: Sequence[str]) -> Row:
    if len(cells) != len(header):
        raise InvalidArgumentError(
            f"{path}:{number}", expected=f"{len(header)} columns", got=len(cells)
        )
    return Row(where=f"{path}:{number}", cells=dict(zip(header, cells, strict=True)))


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
