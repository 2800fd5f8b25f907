"""What a data set is made of: texts with a class, prompts with targets, images, and splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """One or two texts with a class."""

    texts: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt (a meaning representation, a set of triples) and the text to generate.

    `source` is the collection a record came from, where the data set says so.
    """

    prompt: str
    target: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Referenced:
    """A prompt and every text that people wrote for it."""

    prompt: str
    references: tuple[str, ...]


class ArrayImages:
    """Images uint8 (N, H, W, 3) and labels as a map-style data set of (image, label).

    An image comes as (3, H, W), and lies so in memory: batches are put together faster.
    """

    def __init__(self, images: Any, labels: Any) -> None:
        self._images = torch.as_tensor(images).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index], int(self.labels[index])

    def part(self, chosen: Sequence[int]) -> ArrayImages:
        """The images at these places."""
        places = torch.as_tensor(chosen, dtype=torch.int64)
        return ArrayImages(self._images[places].permute(0, 2, 3, 1), self.labels[places])


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[Record]):
    """Records to train on, and held-out ones by the name of their split.

    The first held-out split is the one that is scored during training.
    """

    train: Record
    heldout: Mapping[str, Record]


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Record]):
    """Where splits come from: how to read one, and those to score unless another is wanted."""

    read: Callable[[str], Record]
    heldout: tuple[str, ...]


def by_prompt(records: Iterable[Continuation]) -> list[Referenced]:
    """Gather the targets of equal prompts, in the order in which prompts first appear.

    An empty target is no reference; a prompt that has no other is left out.

    >>> rows = [("a", "x"), ("b", "y"), ("a", "z")]
    >>> found = by_prompt([Continuation(prompt=p, target=t) for p, t in rows])
    >>> [(one.prompt, one.references) for one in found]
    [('a', ('x', 'z')), ('b', ('y',))]
    """
    gathered: dict[str, list[str]] = {}
    for record in records:
        if record.target.strip():
            gathered.setdefault(record.prompt, []).append(record.target)
    return [Referenced(prompt=p, references=tuple(found)) for p, found in gathered.items()]
