"""From the `[data]` section of a run to its splits, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data import glue, hub, nlg, own_tables
from shuffled_dpsgd.tasks.data.arrays import read_cifar
from shuffled_dpsgd.tasks.data.cifar import read_cifar_set
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.data.records import (
    ArrayImages,
    Continuation,
    LabelledText,
    Referenced,
    Source,
    Splits,
    by_prompt,
)
from shuffled_dpsgd.tasks.parts import drawn_part, held_back

HELD_BACK = "held-back"


def read_texts(data: DataConfig, num_labels: int) -> Splits[list[LabelledText]]:
    """Texts or pairs of texts with their classes."""
    return _splits(data, _texts(data, num_labels))


def read_continuations(data: DataConfig) -> Splits[list[Continuation]]:
    """Prompts with the text to generate; every reference is a record of its own."""
    return _splits(data, _dart(data) if data.format == "dart" else _continuations(data))


def read_references(data: DataConfig, split: str | None = None) -> list[Referenced]:
    """Every prompt of a held-out split, with all its references.

    `split` or the one the run is scored on: training records held back, or the usual split.
    """
    if split is None and data.heldout_from_train is not None:
        return by_prompt(read_continuations(data).heldout[HELD_BACK])
    split = split or data.heldout_split
    if data.format == "dart":
        items = _dart_items(data)
        found = nlg.dart_references(items.read(split or items.heldout[0]), data.exclude_sources)
    else:
        source = _continuations(data)
        found = by_prompt(source.read(split or source.heldout[0]))
    return [found[index] for index in drawn_part(len(found), data.max_heldout_examples)]


def scored_split(data: DataConfig) -> str:
    """What `read_references` reads when no split is asked for, in a word."""
    if data.heldout_from_train is not None:
        return HELD_BACK
    usual = "held-out" if data.format == "hub" else "dev"
    return data.heldout_split or usual


def read_images(data: DataConfig, num_labels: int) -> Splits[Any]:
    """Images with their classes."""
    return _splits(data, _images(data, num_labels))


def _texts(data: DataConfig, num_labels: int) -> Source[Any]:
    if data.format == "hub":
        own_tables.check_columns(data, (1, 2), "one or two column names")
        columns = (*data.text_columns, data.label_column)
        return hub.hub_source(data, columns, lambda row: own_tables.labelled(row, data, num_labels))
    if data.source == "hub":
        columns = PUBLISHED[data.format].hub.columns
        return hub.hub_source(data, columns, lambda row: glue.labelled(data.format, row, columns))
    folder = folder_of(data)
    if data.format in PUBLISHED:
        return Source(
            read=lambda split: glue.read_glue(data.format, folder, split),
            heldout=glue.heldout_of(data.format, folder),
        )
    return Source(
        read=lambda split: own_tables.read_labelled_table(folder, split, data, num_labels),
        heldout=("dev",),
    )


def _continuations(data: DataConfig) -> Source[Any]:
    if data.format == "hub":
        own_tables.check_columns(data, (2,), "[prompt column, target column]")
        return hub.hub_source(data, data.text_columns, lambda row: own_tables.continued(row, data))
    if data.source == "hub":
        columns = PUBLISHED[data.format].hub.columns
        return hub.hub_source(data, columns, lambda row: nlg.e2e_record(row, columns))
    folder = folder_of(data)
    if data.format in PUBLISHED:
        return Source(read=lambda split: nlg.read_e2e(folder, split), heldout=("dev",))
    return Source(
        read=lambda split: own_tables.read_continuation_table(folder, split, data),
        heldout=("dev",),
    )


def _dart_items(data: DataConfig) -> Source[Any]:
    if data.source == "hub":
        return hub.hub_source(data, PUBLISHED["dart"].hub.columns, nlg.dart_item)
    folder = folder_of(data)
    return Source(read=lambda split: nlg.read_dart(folder, split), heldout=("dev",))


def _dart(data: DataConfig) -> Source[Any]:
    items = _dart_items(data)
    return Source(
        read=lambda split: nlg.dart_records(items.read(split), data.exclude_sources),
        heldout=items.heldout,
    )


def _images(data: DataConfig, num_labels: int) -> Source[Any]:
    if data.format == "hub":
        own_tables.check_columns(data, (0, 1), "at most the image column")
        columns = (data.text_columns[0] if data.text_columns else "image", data.label_column)
        return hub.hub_source(data, columns, lambda row: hub.image_record(row, columns, num_labels))
    if data.source == "hub":
        known = PUBLISHED[data.format].hub.columns
        return hub.hub_source(data, known, lambda row: hub.image_record(row, known, num_labels))
    folder = folder_of(data)
    if data.format == "cifar":
        return Source(
            read=lambda split: ArrayImages(*read_cifar(folder, split, num_labels)),
            heldout=("test",),
        )
    arrays = read_cifar_set(data.format, folder)
    return Source(read=lambda split: ArrayImages(*arrays[split]), heldout=("test",))


def num_texts(data: DataConfig) -> int:
    """How many texts a labelled record has: one, or the two of a pair."""
    if data.format in glue.LAYOUTS:
        return len(glue.LAYOUTS[data.format].columns[0]) - 1
    return len(data.text_columns)


def folder_of(data: DataConfig) -> Path:
    """The folder (or file) the user named."""
    if data.path is not None:
        return Path(data.path)
    facts = PUBLISHED.get(data.format)
    remedy = ""
    if facts is not None:
        remedy = (
            f'write `path = "…"`, a folder with {facts.files} ({facts.source}), or '
            'write `source = "hub"`'
        )
    raise InvalidArgumentError("data.path", expected="a folder", got=None, remedy=remedy)


def require_task(data: DataConfig, task: str) -> None:
    """Refuse the data of another task."""
    general = {"text-classification": ["csv", "jsonl", "hub"], "causal-lm": ["csv", "jsonl", "hub"]}
    fitting = [name for name, facts in PUBLISHED.items() if facts.task == task]
    fitting += general.get(task, ["cifar", "hub"])
    if data.format not in fitting:
        raise InvalidArgumentError(
            "data.format", expected=f"one of {fitting} for {task}", got=data.format
        )


def _splits(data: DataConfig, source: Source[Any]) -> Splits[Any]:
    """Read what is wanted and take the parts that are wanted of it."""
    train = source.read("train")
    kept: Any = range(len(train))
    limit = data.max_heldout_examples
    if data.heldout_from_train is not None:
        kept, back = held_back(len(train), data.heldout_from_train)
        scored = [back[index] for index in drawn_part(len(back), limit)]
        heldout = {HELD_BACK: _part(train, scored)}
    else:
        names = source.heldout if data.heldout_split is None else (data.heldout_split,)
        heldout = {}
        for name in names:
            records = source.read(name)
            heldout[name] = _part(records, drawn_part(len(records), limit))
    chosen = [kept[index] for index in drawn_part(len(kept), data.max_train_examples)]
    return Splits(train=_part(train, chosen), heldout=heldout)


def _part(records: Any, chosen: Any) -> Any:
    if hasattr(records, "part"):
        return records.part(chosen)
    return [records[index] for index in chosen]
