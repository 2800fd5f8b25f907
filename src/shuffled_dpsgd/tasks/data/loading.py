"""From the `[data]` section of a run to its splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.tasks.chat import CHAT_COLUMNS, Chat, read_chat
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.image_files import read_image_folder, read_npz
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.data.sources import folder_of, open_source
from shuffled_dpsgd.tasks.data.tables import Columns, Row, shortened

HELD_BACK = "held-back"
_PART_SEED = 0
_HOLDING_SEED = 1
Record = TypeVar("Record")


class LabelledText(NamedTuple):
    """One or two texts with a class."""

    texts: tuple[str, ...]
    label: int
    unit: Any = None


class Continuation(NamedTuple):
    """A prompt (a meaning representation, a set of triples) and the text to generate.

    `source` is the collection a record came from, where the data set says so.
    """

    prompt: str
    target: str
    source: str = ""


class Referenced(NamedTuple):
    """A prompt and every text that people wrote for it."""

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[Record]):
    """Records to train on, and held-out ones by the name of their split.

    The first held-out split is the one that is scored during training.
    """

    train: Record
    heldout: Mapping[str, Record]


def read_texts(
    data: DataConfig, num_labels: int, unit: str | None = None
) -> Splits[list[LabelledText]]:
    """Texts or pairs of texts with their classes, and what the column `unit` says."""
    facts = PUBLISHED.get(data.format)
    names = data.label_names if facts is None else facts.classes
    _check_columns(data, (1, 2), "one or two column names")
    source = open_source(data, (*data.text_columns, data.label_column))

    def convert(row: Row, columns: Columns) -> LabelledText:
        *texts, label = columns
        owner = None if unit is None else row.cells.get(unit)
        return LabelledText(tuple(map(row.text, texts)), row.label(label, num_labels, names), owner)

    return _splits(data, lambda split: source.read(split, convert), source.heldout)


def read_continuations(data: DataConfig) -> Splits[list[Continuation]]:
    """Prompts with the text to generate; every reference is a record of its own."""
    read_items, heldout = _continuations(data)
    return _splits(data, lambda split: [*chain.from_iterable(read_items(split))], heldout)


def read_chats(data: DataConfig) -> Splits[list[Chat]]:
    """Chats, or prompts with their completions."""
    _check_columns(data, (0, 1, 2), "nothing, the chat's column, or prompt and completion")
    source = open_source(data, *((data.text_columns,) if data.text_columns else CHAT_COLUMNS))
    return _splits(data, lambda split: source.read(split, read_chat), source.heldout)


def read_references(data: DataConfig, split: str | None = None) -> list[Referenced]:
    """Every prompt of a held-out split, with all its references.

    `split` or the one the run is scored on: training records held back, or the usual split.
    """
    if split is None and data.heldout_from_train is not None:
        return by_prompt(read_continuations(data).heldout[HELD_BACK])
    read_items, heldout = _continuations(data)
    items = read_items(split or data.heldout_split or heldout[0])
    if data.format != "dart":  # Its items have all their references, and may repeat a prompt.
        items = [chain.from_iterable(items)]
    found = [one for item in items for one in by_prompt(item)]
    return [found[index] for index in drawn_part(len(found), data.max_heldout_examples)]


def read_images(data: DataConfig, num_labels: int) -> Splits[Any]:
    """Images with their classes: PIL's, or tensors uint8 (3, H, W)."""
    if data.is_on_hub:
        _check_columns(data, (0, 1), "at most the image column")
        source = open_source(data, (*(data.text_columns or ("image",)), data.label_column))

        def convert(row: Row, columns: Columns) -> tuple[Any, int]:
            image, label = row.cells[columns[0]], row.label(columns[1], num_labels)
            if not hasattr(image, "convert"):
                raise InvalidArgumentError(
                    row.where, expected=f"an image in {columns[0]!r}", got=type(image).__name__
                )
            return image.convert("RGB"), label

        return _splits(data, lambda split: source.read(split, convert), source.heldout)
    folder = folder_of(data)
    if data.format == "image-folder":
        return _splits(data, lambda split: read_image_folder(folder, split), ("dev",))

    def read(split: str) -> TensorDataset:
        images, labels = read_npz(folder, split, num_labels)
        # Contiguous images are faster to stack.
        planes = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        return TensorDataset(planes, torch.from_numpy(labels))

    return _splits(data, read, ("test",))


def scored_split(data: DataConfig) -> str:
    """The name of what `read_references` reads when no split is asked for."""
    if data.heldout_from_train is not None:
        return HELD_BACK
    return data.heldout_split or ("held-out" if data.format == "hub" else "dev")


def num_texts(data: DataConfig) -> int:
    """How many texts a labelled record has: one, or the two of a pair."""
    if data.format in PUBLISHED:
        return len(PUBLISHED[data.format].columns[0]) - 1
    return len(data.text_columns)


def require_task(data: DataConfig, task: str) -> None:
    """Refuse the data of another task."""
    fitting = [name for name, facts in PUBLISHED.items() if facts.task == task]
    own = {"image-classification": ["image-folder", "cifar", "hub"], "sft": ["jsonl", "hub"]}
    fitting += own.get(task, ["csv", "jsonl", "hub"])
    require(data.format in fitting, "data.format", f"one of {fitting} for {task}", data.format)


def check_sizes(splits: Splits[Any], *, batch: int) -> None:
    """Refuse less than one expected batch to train on, or nothing to score."""
    if len(splits.train) < batch:
        raise InvalidArgumentError(
            "training.expected_batch_size",
            expected=f"at most the number of training examples, {len(splits.train)}",
            got=batch,
        )
    for name, heldout in splits.heldout.items():
        if not len(heldout):
            raise InvalidArgumentError(
                "data.path",
                expected=f"at least one held-out record in {name}",
                got=0,
                remedy="a run without a score cannot be judged: hold some records back",
            )


def drawn_part(size: int, limit: int | None) -> list[int]:
    """At most `limit` of `size` record numbers, drawn from a public seed, in order.

    Not the first ones: files are often sorted, by class or by source.

    >>> len(drawn_part(10, 3)), drawn_part(3, None), drawn_part(3, 8)
    (3, [0, 1, 2], [0, 1, 2])
    """
    if limit is None or limit >= size:
        return list(range(size))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(_PART_SEED))
    return sorted(order[:limit].tolist())


def by_prompt(records: Iterable[Continuation]) -> list[Referenced]:
    """Gather the targets of equal prompts, in the order in which prompts first appear.

    An empty target is no reference; a prompt that has no other is left out.

    >>> rows = [("a", "x"), ("b", "y"), ("a", "z")]
    >>> [(one.prompt, one.references) for one in by_prompt(Continuation(*row) for row in rows)]
    [('a', ('x', 'z')), ('b', ('y',))]
    """
    gathered: dict[str, list[str]] = {}
    for record in records:
        if record.target.strip():
            gathered.setdefault(record.prompt, []).append(record.target)
    return [Referenced(prompt, tuple(found)) for prompt, found in gathered.items()]


def _check_columns(data: DataConfig, counts: Sequence[int], expected: str) -> None:
    """Refuse any other number of `text_columns`; those of a named set are known."""
    if data.format not in PUBLISHED and len(data.text_columns) not in counts:
        raise InvalidArgumentError("data.text_columns", expected=expected, got=data.text_columns)


def _continuations(
    data: DataConfig,
) -> tuple[Callable[[str], Iterable[Iterable[Continuation]]], tuple[str, ...]]:
    """A function that reads a split, and the splits to score."""
    _check_columns(data, (2,), "[prompt column, target column]")
    source = open_source(data, data.text_columns)

    def convert(row: Row, columns: Columns) -> list[Continuation]:
        if data.format == "dart":
            return [one for one in _dart_records(row) if one.source not in data.exclude_sources]
        prompt, target = map(row.text, columns)
        return [Continuation(prompt, target)]

    return lambda split: source.read(split, convert), source.heldout


def _dart_records(row: Row) -> list[Continuation]:
    """One record for each text of an item, whose triples are joined."""
    triples, notes = row.cells["tripleset"], row.cells["annotations"]
    if not _is_list(list, triples) or not all(len(t) == 3 and _is_list(str, t) for t in triples):
        raise InvalidArgumentError(
            row.where, expected="lists of three texts in 'tripleset'", got=shortened(str(triples))
        )
    texts: Any = None
    sources: Any = None
    if isinstance(notes, dict):  # The hub turns a list of objects into an object of lists.
        texts, sources = notes.get("text"), notes.get("source")
    elif _is_list(dict, notes):
        texts = [note.get("text") for note in notes]
        sources = [note.get("source", "") for note in notes]
    if not _is_list(str, texts) or not _is_list(str, sources) or len(texts) != len(sources):
        raise InvalidArgumentError(
            row.where,
            expected="as many texts as sources in 'annotations'",
            got=shortened(str(notes)),
        )
    prompt = " | ".join(" : ".join(triple) for triple in triples)
    return [Continuation(prompt, *each) for each in zip(texts, sources, strict=True)]


def _is_list(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _splits(data: DataConfig, read: Callable[[str], Any], usual: tuple[str, ...]) -> Splits[Any]:
    """Read the splits and take the parts that are asked for, drawn from fixed seeds."""
    train = read("train")
    kept = list(range(len(train)))
    limit, count = data.max_heldout_examples, data.heldout_from_train
    heldout = {}
    if count is not None:
        require(
            count < len(train), "data.heldout_from_train", f"fewer than {len(train)} records", count
        )
        generator = torch.Generator().manual_seed(_HOLDING_SEED)
        order = torch.randperm(len(train), generator=generator).tolist()
        kept, back = sorted(order[count:]), sorted(order[:count])
        heldout[HELD_BACK] = _part(train, [back[i] for i in drawn_part(count, limit)])
    else:
        for name in usual if data.heldout_split is None else (data.heldout_split,):
            records = read(name)
            heldout[name] = _part(records, drawn_part(len(records), limit))
    chosen = [kept[index] for index in drawn_part(len(kept), data.max_train_examples)]
    return Splits(train=_part(train, chosen), heldout=heldout)


def _part(records: Any, chosen: list[int]) -> Any:
    if isinstance(records, TensorDataset):
        return TensorDataset(*(tensor[chosen] for tensor in records.tensors))
    if hasattr(records, "part"):
        return records.part(chosen)
    return [records[index] for index in chosen]
