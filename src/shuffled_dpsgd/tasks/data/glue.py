"""SST-2, QQP, MNLI and QNLI: the files of GLUE, those MNLI itself published, and JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shuffled_dpsgd.tasks.data.places import find_file, missing_file
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.data.records import LabelledText
from shuffled_dpsgd.tasks.data.tables import Row, columns_of, read_table


@dataclass(frozen=True, kw_only=True)
class GlueLayout:
    """How the files of one set are called, and their columns: texts first, the class last.

    A file has one of the sets of `columns`. `unlabelled` marks records that have no class: those
    are left out, as their publisher says. `broken_share` is the share of lines that the published
    file itself has broken.
    """

    stems: Mapping[str, tuple[str, ...]]
    columns: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...] = ("tsv",)
    unlabelled: str | None = None
    broken_share: float = 0.0


def _stems(name: str) -> dict[str, tuple[str, ...]]:
    """The usual names of the files to train on and of those held out."""
    return {
        split: (split, f"{split}_partial", f"{name}_{split}", f"{name}_{split}_subset")
        for split in ("train", "dev")
    }


LAYOUTS: Mapping[str, GlueLayout] = {
    "sst2": GlueLayout(
        stems=_stems("sst2") | {"test": ("test_labelled_from_SST", "test")},
        columns=(("sentence", "label"),),
    ),
    # Questions with a line break in them are broken over two lines in GLUE's file; its own
    # loaders leave those lines out, and that gives the published number of records.
    "qqp": GlueLayout(
        stems=_stems("qqp"),
        columns=(("question1", "question2", "is_duplicate"), ("question1", "question2", "label")),
        kinds=("tsv", "jsonl"),
        broken_share=1e-3,
    ),
    "mnli": GlueLayout(
        stems=_stems("mnli")
        | {
            "train": (*_stems("mnli")["train"], "multinli_1.0_train"),
            "matched": ("dev_matched", "multinli_1.0_dev_matched"),
            "mismatched": ("dev_mismatched", "multinli_1.0_dev_mismatched"),
        },
        columns=(("sentence1", "sentence2", "gold_label"), ("premise", "hypothesis", "label")),
        kinds=("tsv", "jsonl"),
        unlabelled="-",
    ),
    "qnli": GlueLayout(stems=_stems("qnli"), columns=(("question", "sentence", "label"),)),
}


def read_glue(name: str, path: Path, split: str) -> list[LabelledText]:
    """One split of a set, from the folder the user named."""
    layout = LAYOUTS[name]
    file = _file(name, path, split)
    if file is None:
        raise missing_file(name, path, f"{layout.stems[split][0]}.tsv")
    found = columns_of(file)
    fitting = (c for c in layout.columns if set(c) <= set(found))
    columns = next(fitting, layout.columns[0])
    rows = read_table(file, columns, broken_share=layout.broken_share)
    label = columns[-1]
    return [labelled(name, row, columns) for row in rows if row.cells[label] != layout.unlabelled]


def heldout_of(name: str, path: Path) -> tuple[str, ...]:
    """The splits to score: the published ones, or a single `dev` file where it stands alone."""
    usual = PUBLISHED[name].heldout
    if not any(_file(name, path, split) for split in usual) and _file(name, path, "dev"):
        return ("dev",)
    return usual


def labelled(name: str, row: Row, columns: Sequence[str]) -> LabelledText:
    """A record of these columns, the last of which holds the class: a number, or its name."""
    *texts, label = columns
    classes = PUBLISHED[name].classes
    named = name in ("mnli", "qnli")
    chosen = row.label_named(label, classes) if named else row.label(label, len(classes))
    return LabelledText(texts=tuple(row.text(column) for column in texts), label=chosen)


def _file(name: str, path: Path, split: str) -> Path | None:
    layout = LAYOUTS[name]
    stems = layout.stems[split]
    return find_file(name, path, [f"{stem}.{kind}" for kind in layout.kinds for stem in stems])
