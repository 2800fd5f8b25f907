"""E2E and DART: text from meaning representations and from triples, with all their references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.places import find_file, missing_file
from shuffled_dpsgd.tasks.data.records import Continuation, Referenced, by_prompt
from shuffled_dpsgd.tasks.data.tables import Row, read_table, shortened

_E2E_STEMS = {"train": "trainset", "dev": "devset", "test": "testset_w_refs"}


@dataclass(frozen=True, kw_only=True)
class DartItem:
    """A set of triples as one prompt, and what people wrote for it, each with its source."""

    prompt: str
    notes: tuple[tuple[str, str], ...]


def read_e2e(path: Path, split: str) -> list[Continuation]:
    """E2E NLG: `trainset.csv`, `devset.csv`, `testset_w_refs.csv` with columns mr, ref."""
    name = f"{_E2E_STEMS[split]}.csv"
    file = find_file("e2e", path, [name])
    if file is None:
        raise missing_file("e2e", path, name)
    return [e2e_record(row, ("mr", "ref")) for row in read_table(file, ("mr", "ref"))]


def e2e_record(row: Row, columns: Sequence[str]) -> Continuation:
    """A record of the columns for the meaning representation and the text."""
    prompt, target = columns
    return Continuation(prompt=row.text(prompt), target=row.text(target))


def read_dart(path: Path, split: str) -> list[DartItem]:
    """DART: the official JSON file, or one item a line."""
    names = [f"{split}.jsonl", f"dart-v1.1.1-full-{split}.json", f"{split}.json"]
    file = find_file("dart", path, names)
    if file is None:
        raise missing_file("dart", path, names[0])
    return [dart_item(row) for row in read_table(file, ("tripleset", "annotations"))]


def dart_item(row: Row) -> DartItem:
    """Triples joined by ` | `, their parts by ` : `."""
    prompt = " | ".join(" : ".join(triple) for triple in _triples(row))
    return DartItem(prompt=prompt, notes=tuple(_notes(row)))


def dart_records(items: Iterable[DartItem], excluded: Sequence[str] = ()) -> list[Continuation]:
    """Every annotation is one record; those of `excluded` sources are left out."""
    return [
        Continuation(prompt=item.prompt, target=text, source=source)
        for item in items
        for source, text in item.notes
        if source not in excluded
    ]


def dart_references(items: Iterable[DartItem], excluded: Sequence[str] = ()) -> list[Referenced]:
    """The items as published, each with the annotations that are not empty."""
    found = (by_prompt(dart_records([item], excluded)) for item in items)
    return [one for item in found for one in item]


def _triples(row: Row) -> list[list[str]]:
    triples = row.cells["tripleset"]
    if not isinstance(triples, list) or not all(map(_is_triple, triples)):
        raise InvalidArgumentError(
            row.where, expected="lists of three texts in 'tripleset'", got=shortened(str(triples))
        )
    return triples


def _is_triple(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 3
    return is_list and all(isinstance(part, str) for part in value)


def _paired(notes: dict[str, Any], where: str) -> list[dict[str, Any]]:
    sources: Any = notes.get("source")
    texts: Any = notes.get("text")
    lists = isinstance(sources, list) and isinstance(texts, list)
    if not lists or len(sources) != len(texts):
        raise InvalidArgumentError(
            where, expected="as many texts as sources in 'annotations'", got=shortened(str(notes))
        )
    return [{"source": s, "text": t} for s, t in zip(sources, texts, strict=True)]


def _notes(row: Row) -> Iterator[tuple[str, str]]:
    """Objects with a text and its source; the hub turns a list of them into two lists."""
    notes: Any = row.cells["annotations"]
    if isinstance(notes, dict):
        notes = _paired(notes, row.where)
    if not isinstance(notes, list) or not all(
        isinstance(note, dict) and isinstance(note.get("text"), str) for note in notes
    ):
        raise InvalidArgumentError(
            row.where, expected="objects with a 'text' in 'annotations'", got=shortened(str(notes))
        )
    for note in notes:
        yield str(note.get("source", "")), note["text"]
