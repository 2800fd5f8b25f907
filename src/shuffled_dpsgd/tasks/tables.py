"""Rows of text files, each with the place it came from.

Tab-separated, comma-separated and JSON-lines files, compressed (`.xz`) or not. Whatever cannot be
read is an error that names the file and the line; nothing is skipped and nothing is converted
silently.
"""

from __future__ import annotations

import csv
import json
import lzma
import re
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

    def _cell(self, column: str) -> Any:
        if column not in self.cells:
            raise InvalidArgumentError(
                self.where, expected=f"a value for {column!r}", got=sorted(map(str, self.cells))
            )
        return self.cells[column]


def read_table(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a `.tsv`, `.csv` or `.jsonl` file, which must have `columns`."""
    kind = path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix
    readers = {".tsv": _read_tsv, ".csv": _read_csv, ".jsonl": _read_jsonl}
    return readers[kind](path, columns)


def find_table(folder: Path, stems: Sequence[str], suffix: str) -> Path:
    """The first of `stems` there is in `folder`, as `stem.suffix` or `stem.suffix.xz`."""
    names = [f"{stem}.{suffix}{packed}" for stem in stems for packed in ("", ".xz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InvalidArgumentError(
        "data.path",
        expected=f"a folder with {names[0]} or {names[1]}",
        got=str(folder),
        remedy="check the path; in a file it is relative to that file",
    )


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


def _read_tsv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Without quoting, as GLUE has it."""
    lines = _lines(path)
    header = next(lines, "").rstrip("\r\n").split("\t")
    require_columns(path, header, columns)
    for number, line in enumerate(lines, start=2):
        yield _row(path, number, header, line.rstrip("\r\n").split("\t"))


def _read_csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = next(reader, [])
        require_columns(path, header, columns)
        for cells in reader:
            yield _row(path, reader.line_num, header, cells)
    except csv.Error as error:
        raise InvalidArgumentError(
            f"{path}:{reader.line_num}",
            expected="comma-separated values, quoted as CSV has it",
            got=str(error),
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
        if not isinstance(cells, dict):
            raise InvalidArgumentError(where, expected="one JSON object", got=shortened(cells))
        missing = [name for name in columns if name not in cells]
        if missing:
            raise InvalidArgumentError(
                where, expected=f"keys {list(columns)}", got=f"without {missing}"
            )
        yield Row(where=where, cells=cells, typed=True)


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
