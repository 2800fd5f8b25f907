"""Data sets from a folder the user names, in the layouts they are published in.

Text files may be compressed (`.xz`). A missing file, column or label is an error that names it;
nothing is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.tables import Row, find_table, read_table, shortened


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """One or two texts with a class."""

    texts: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt (a meaning representation, a set of triples) and the text to generate."""

    prompt: str
    target: str


HELDOUT_STEMS = ("dev", "validation", "test")


def read_sst2(folder: Path, split: str) -> list[LabelledText]:
    """GLUE SST-2: `train.tsv`, `dev.tsv` with columns sentence, label; no quoting."""
    path = find_table(folder, (split, f"{split}_partial"), "tsv")
    rows = read_table(path, ("sentence", "label"))
    return [LabelledText(texts=(r.text("sentence"),), label=r.label("label", 2)) for r in rows]


def read_qnli(folder: Path, split: str) -> list[LabelledText]:
    """GLUE QNLI: columns question, sentence, label (entailment or not_entailment)."""
    path = find_table(folder, (split, f"{split}_partial"), "tsv")
    classes = {"entailment": 0, "not_entailment": 1}
    examples = []
    for row in read_table(path, ("question", "sentence", "label")):
        label = row.text("label")
        if label not in classes:
            raise InvalidArgumentError(
                row.where, expected=f"a label in {set(classes)}", got=shortened(label)
            )
        texts = (row.text("question"), row.text("sentence"))
        examples.append(LabelledText(texts=texts, label=classes[label]))
    return examples


def read_e2e(folder: Path, split: str) -> list[Continuation]:
    """E2E NLG: `trainset.csv`, `devset.csv`, `testset_w_refs.csv` with columns mr, ref."""
    stem = {"train": "trainset", "dev": "devset", "test": "testset_w_refs"}[split]
    rows = read_table(find_table(folder, (stem,), "csv"), ("mr", "ref"))
    return [Continuation(prompt=row.text("mr"), target=row.text("ref")) for row in rows]


def read_dart(folder: Path, split: str) -> list[Continuation]:
    """DART: one JSON item per line, each annotation one example; triples joined by ` | `."""
    examples = []
    for row in read_table(find_table(folder, (split,), "jsonl"), ("tripleset", "annotations")):
        prompt = " | ".join(" : ".join(triple) for triple in _triples(row))
        examples += [Continuation(prompt=prompt, target=text) for text in _annotations(row)]
    return examples


def read_labelled_table(
    folder: Path, split: str, data: DataConfig, num_labels: int
) -> list[LabelledText]:
    """A folder of CSV or JSON-lines files; `text_columns` names one or two text columns."""
    check_columns(data, (1, 2), "one or two column names")
    rows = _own_table(folder, split, data, (*data.text_columns, data.label_column))
    return [labelled(row, data, num_labels) for row in rows]


def read_continuation_table(folder: Path, split: str, data: DataConfig) -> list[Continuation]:
    """A folder of CSV or JSON-lines files; `text_columns` names prompt and target."""
    check_columns(data, (2,), "[prompt column, target column]")
    return [continued(row, data) for row in _own_table(folder, split, data, data.text_columns)]


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


def _own_table(folder: Path, split: str, data: DataConfig, columns: tuple[str, ...]) -> Any:
    stems = ("train",) if split == "train" else HELDOUT_STEMS
    return read_table(find_table(folder, stems, data.format), columns)


def _triples(row: Row) -> list[list[str]]:
    triples = row.cells["tripleset"]
    if not isinstance(triples, list) or not all(
        isinstance(triple, list) and all(isinstance(part, str) for part in triple)
        for triple in triples
    ):
        raise InvalidArgumentError(
            row.where, expected="lists of texts in 'tripleset'", got=shortened(str(triples))
        )
    return triples


def _annotations(row: Row) -> list[str]:
    notes = row.cells["annotations"]
    if not isinstance(notes, list) or not all(
        isinstance(note, dict) and isinstance(note.get("text"), str) for note in notes
    ):
        raise InvalidArgumentError(
            row.where, expected="objects with a 'text' in 'annotations'", got=shortened(str(notes))
        )
    return [note["text"] for note in notes]
