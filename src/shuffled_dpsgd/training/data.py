"""From logical batches of indices to physical batches of tensors.

A logical batch is what Poisson sampling drew; a physical batch is what fits in memory. An empty
logical batch has one physical batch without data, so that its step is taken as well.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.training.layout import Layout, Part

# Held by whoever loads records: the prefetching thread, or a check. Data sets need not be
# thread-safe, and checks change the global generators, which all threads share.
LOADING = threading.RLock()


class MapStyle(Protocol):
    """Any map-style data set: torch's, Hugging Face's, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Batch(tuple[Any, ...]):
    """A physical batch of tuple samples: unpack it, or name its first two fields.

    >>> x, y = Batch((1, 2))
    >>> Batch((1, 2)).y
    2
    """

    __slots__ = ()

    @property
    def x(self) -> Any:
        """The first field: inputs."""
        return self[0]

    @property
    def y(self) -> Any:
        """The second field: targets."""
        return self[1]


@dataclass(frozen=True, kw_only=True)
class LogicalBatch:
    """What the sampler drew for one step.

    Where all ranks must run equally many physical batches, `num_parts` is how many, and those
    that a rank lacks consist of the record `filler`, which does not count.
    """

    step: int
    indices: tuple[int, ...]
    num_parts: int = 0
    filler: int | None = None


@dataclass(frozen=True, kw_only=True)
class PhysicalBatch:
    """A part of a logical batch; `data` is None when the logical batch is empty.

    `part` says which records are in it. `completes` marks the last part of its logical batch.
    """

    step: int
    part: Part
    completes: bool
    data: Any = None

    @property
    def rows(self) -> int:
        """How many rows it has, one for each record."""
        return len(self.part.records)

    @property
    def size(self) -> int:
        """How many samples count: the first ones. The others only pad the batch."""
        return self.part.counted

    @property
    def padded(self) -> bool:
        """Whether some samples do not count."""
        return self.size < self.part.samples


@runtime_checkable
class LengthCollate(Protocol):
    """A collate function that can also pad a batch to a length it is given."""

    def __call__(self, samples: list[Any], /) -> Any: ...

    def to_length(self, samples: list[Any], length: int, /) -> Any:
        """The batch with every sample padded to `length` tokens, so that none is seen."""
        ...


def physical_batches(
    data: MapStyle,
    logical: Iterable[LogicalBatch],
    *,
    layout: Layout,
    collate: Callable[[list[Any]], Any] | None = None,
    rows_of: Callable[[Part, int], Part] = lambda part, step: part,
    **loading: Any,
) -> Iterator[PhysicalBatch]:
    """Load logical batches in the parts of a layout, in order, none skipped.

    `rows_of(part, step)` puts records in the place of the units that a part names. `loading` goes
    to torch's `DataLoader`.
    """
    waiting: deque[PhysicalBatch] = deque()

    def every_part() -> Iterator[Part]:
        for batch in logical:
            parts = layout.parts(batch.indices)
            if batch.filler is not None:
                idle = Part(records=(batch.filler,), counted=0)
                parts = [*parts, *[idle] * (batch.num_parts - len(parts))]
            for number, named in enumerate(parts, start=1):
                part = rows_of(named, batch.step)
                last = number == len(parts)
                waiting.append(PhysicalBatch(step=batch.step, part=part, completes=last))
                yield part
            if not parts:
                nothing = Part(records=(), counted=0)
                waiting.append(PhysicalBatch(step=batch.step, part=nothing, completes=True))

    loader: DataLoader[Any] = DataLoader(
        PartLoader(data, collate or default_collate),
        batch_size=None,
        sampler=every_part(),
        collate_fn=as_it_is,
        **loading,
    )
    for loaded in loader:
        while waiting[0].rows == 0:
            yield waiting.popleft()
        yield replace(waiting.popleft(), data=loaded)
    yield from waiting


class PartLoader(Dataset[Any]):
    """Loads and collates whole physical batches; an error says which records it was about."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.data = data
        self.collate = collate
        self._load_many: Callable[[list[int]], list[Any]] | None
        self._load_many = getattr(data, "__getitems__", None)

    def __getitem__(self, part: Part) -> Any:
        with LOADING:
            return self.collated(self.samples(list(part.records)), part)

    @property
    def loads_many(self) -> bool:
        """Whether the data set has `__getitems__`."""
        return self._load_many is not None

    def collated(self, samples: list[Any], part: Part) -> Any:
        """The samples of a part as one batch."""
        try:
            if part.length is not None and isinstance(self.collate, LengthCollate):
                return self.collate.to_length(samples, part.length)
            return self.collate(samples)
        except Exception as error:
            error.add_note(f"while collating records {_listed(part.records[: part.counted])}")
            raise

    def samples(self, records: list[int]) -> list[Any]:
        """These records of the data set, in order."""
        if self._load_many is None and len(records) > 1:
            return [sample for record in records for sample in self.samples([record])]
        try:
            return self._load_many(records) if self._load_many else [self.data[i] for i in records]
        except Exception as error:
            error.add_note(f"while loading record{'s'[: len(records) > 1]} {_listed(records)}")
            raise


def taken_from(loader: MapStyle | DataLoader[Any]) -> tuple[MapStyle, dict[str, Any]]:
    """The data set of a loader, and how it loads; the user is told that its sampler is replaced.

    Anything but a `DataLoader` is taken as the data set itself.
    """
    if not isinstance(loader, DataLoader):
        return loader, {}
    if loader.batch_sampler is None or loader.worker_init_fn is not None:
        raise InvalidArgumentError(
            "data",
            expected="a DataLoader that makes batches of single records, without worker_init_fn",
            got=f"batch_size={loader.batch_size}, worker_init_fn={loader.worker_init_fn}",
            remedy="pass the data set itself, with collate= and num_workers=",
        )
    say_once(
        "of the DataLoader, private.batches uses the data set, collate_fn and workers; its batches "
        f"({type(loader.sampler).__name__}, batch_size={loader.batch_size}) are replaced by those "
        "of Poisson sampling, which ε is about"
    )
    taken = {"collate": loader.collate_fn, "num_workers": loader.num_workers}
    records: Any = loader.dataset
    return records, taken | {"pin_memory": loader.pin_memory or None}


def _listed(records: Sequence[int]) -> str:
    shown = ", ".join(map(str, records[:8]))
    return f"{shown} and {len(records) - 8} more" if len(records) > 8 else shown


def as_it_is(loaded: Any) -> Any:
    """A collate function for batches that are complete already."""
    return loaded


def shaped(loaded: Any) -> Any:
    """A collated batch as the user gets it: tuples as `Batch`, mappings as they are."""
    if isinstance(loaded, Mapping):
        return loaded
    if isinstance(loaded, tuple | list):
        return Batch(loaded)
    return Batch((loaded,))


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor inside tuples, lists and mappings; other objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        if type(value) is dict or not hasattr(value, "to"):
            return moved
        found = (item.device for item in moved.values() if hasattr(item, "device"))
        return value.to(next(found, "cpu"))
    if isinstance(value, Batch):
        return Batch(to_device(item, device) for item in value)
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if type(value) is tuple:
        return tuple(to_device(item, device) for item in value)
    return value
