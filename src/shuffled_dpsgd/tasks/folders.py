"""Data sets from a folder the user names, in the layouts they are published in.

Text files may be compressed (`.xz`). A missing file, column or label is an error that names it;
nothing is skipped.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shuffled_dpsgd.errors import InvalidArgumentError


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


def read_sst2(folder: Path, split: str) -> list[LabelledText]:
    """GLUE SST-2: `train.tsv`, `dev.tsv` with columns sentence, label; no quoting."""
    rows = _read_tsv(_find(folder, split, "tsv"), ("sentence", "label"))
    return [LabelledText(texts=(text,), label=int(label)) for text, label in rows]


def read_qnli(folder: Path, split: str) -> list[LabelledText]:
    """GLUE QNLI: columns question, sentence, label (entailment or not_entailment)."""
    path = _find(folder, split, "tsv")
    classes = {"entailment": 0, "not_entailment": 1}
    examples = []
    for question, sentence, label in _read_tsv(path, ("question", "sentence", "label")):
        if label not in classes:
            raise InvalidArgumentError(str(path), expected=f"a label in {set(classes)}", got=label)
        examples.append(LabelledText(texts=(question, sentence), label=classes[label]))
    return examples


def read_e2e(folder: Path, split: str) -> list[Continuation]:
    """E2E NLG: `trainset.csv`, `devset.csv`, `testset_w_refs.csv` with columns mr, ref."""
    stem = {"train": "trainset", "dev": "devset", "test": "testset_w_refs"}[split]
    path = _find(folder, stem, "csv")
    with _open(path) as file:
        reader = csv.DictReader(file)
        _require_columns(path, reader.fieldnames or [], ("mr", "ref"))
        return [Continuation(prompt=row["mr"], target=row["ref"]) for row in reader]


def read_dart(folder: Path, split: str) -> list[Continuation]:
    """DART: one JSON item per line, each annotation one example; triples joined by ` | `."""
    examples = []
    with _open(_find(folder, split, "jsonl")) as file:
        for line in file:
            item = json.loads(line)
            prompt = " | ".join(" : ".join(triple) for triple in item["tripleset"])
            examples += [
                Continuation(prompt=prompt, target=note["text"]) for note in item["annotations"]
            ]
    return examples


def read_cifar(folder: Path, split: str) -> tuple[Any, Any]:
    """CIFAR as numpy arrays: images uint8 (N, H, W, 3) and integer labels.

    `folder` is an `.npz` file, or a folder with exactly one, holding `train_images`,
    `train_labels`, `test_images`, `test_labels`.
    """
    import numpy as np

    path = folder
    if folder.is_dir():
        found = sorted(item for item in folder.glob("*.npz") if item.stem != "labels")
        if len(found) != 1:
            raise InvalidArgumentError(
                "data.path",
                expected="a folder with exactly one .npz of images",
                got=f"{folder} ({len(found)} found)",
                remedy="unpack the images to one .npz and name that file",
            )
        path = found[0]
    if not path.is_file():
        raise InvalidArgumentError("data.path", expected="an .npz file or a folder", got=str(path))
    part = "train" if split == "train" else "test"
    with np.load(path) as arrays:
        names = [f"{part}_images", f"{part}_labels"]
        _require_columns(path, list(arrays), names)
        images, labels = (arrays[name] for name in names)
    return images, labels.astype("int64")


def _find(folder: Path, stem: str, suffix: str) -> Path:
    """`stem.suffix` in `folder`, compressed or not; `stem_partial` stands in for a missing one."""
    names = [f"{s}.{suffix}{x}" for s in (stem, f"{stem}_partial") for x in ("", ".xz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InvalidArgumentError(
        "data.path", expected=f"a folder with {names[0]} or {names[1]}", got=str(folder)
    )


def _open(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return io.TextIOWrapper(lzma.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_tsv(path: Path, columns: tuple[str, ...]) -> Iterator[list[str]]:
    with _open(path) as file:
        header = file.readline().rstrip("\r\n").split("\t")
        _require_columns(path, header, columns)
        places = [header.index(column) for column in columns]
        for number, line in enumerate(file, start=2):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) != len(header):
                raise InvalidArgumentError(
                    f"{path}:{number}", expected=f"{len(header)} columns", got=len(cells)
                )
            yield [cells[place] for place in places]


def _require_columns(path: Path, found: Any, wanted: Any) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InvalidArgumentError(
            str(path), expected=f"columns {list(wanted)}", got=f"without {missing}"
        )
