"""From logical batches of indices to physical batches of tensors.

A logical batch is what Poisson sampling drew; a physical batch is what fits in memory. Tags travel
beside the loader so that the consumer knows which physical batch completes which logical one, and
so that empty logical batches, for which there is nothing to load, are not forgotten.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shuffled_dpsgd.training.background import loaded_ahead
from shuffled_dpsgd.training.layout import Layout, Part

# A thread may load ahead while records are loaded for a check: a data set need not be prepared for
# two at a time, and a check moves the generators that all threads share.
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

    It has `rows` samples, of which the first `size` count, perhaps none; the others only fill it.
    `part` says which records they are.
    """

    step: int
    size: int
    rows: int
    completes: bool
    data: Any
    part: Part


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
    num_workers: int = 0,
    pin_memory: bool = False,
    background: bool = False,
    generator: torch.Generator | None = None,
) -> Iterator[PhysicalBatch]:
    """Load logical batches in the parts of a layout, in order, none skipped.

    With `background`, a thread loads ahead of what is asked for, unless `num_workers` processes
    do so already.
    """
    loaded = _physical_batches(
        data, logical, layout, collate, num_workers=num_workers, pin_memory=pin_memory,
        generator=generator,
    )  # fmt: skip
    return loaded_ahead(loaded) if background and num_workers == 0 else loaded


def _physical_batches(
    data: MapStyle,
    logical: Iterable[LogicalBatch],
    layout: Layout,
    collate: Callable[[list[Any]], Any] | None,
    **options: Any,
) -> Iterator[PhysicalBatch]:
    tags: deque[PhysicalBatch] = deque()

    def every_part() -> Iterator[Part]:
        for batch in logical:
            parts = layout.parts(batch.indices)
            if batch.filler is not None:
                idle = Part(records=(batch.filler,), counted=0)
                parts = [*parts, *[idle] * (batch.num_parts - len(parts))]
            for number, part in enumerate(parts, start=1):
                tags.append(_tag(batch, part, completes=number == len(parts)))
                yield part
            if not parts:
                tags.append(_tag(batch, Part(records=(), counted=0), completes=True))

    loader: DataLoader[Any] = DataLoader(
        PartLoader(data, collate or default_collate),
        batch_size=None,
        sampler=every_part(),
        collate_fn=_as_it_is,
        **options,
    )
    for loaded in loader:
        while tags[0].rows == 0:
            yield tags.popleft()
        yield replace(tags.popleft(), data=loaded)
    yield from tags


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
        """Whether the data set loads several records in one call."""
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
        """What the data set holds at these places, in their order."""
        if self._load_many is not None:
            try:
                return self._load_many(records)
            except Exception as error:
                error.add_note(f"while loading records {_listed(records)}")
                raise
        return [self._sample(record) for record in records]

    def _sample(self, record: int) -> Any:
        try:
            return self.data[record]
        except Exception as error:
            error.add_note(f"while loading record {record} of the data set")
            raise


def _listed(records: Sequence[int]) -> str:
    shown = ", ".join(map(str, records[:8]))
    return f"{shown} and {len(records) - 8} more" if len(records) > 8 else shown


def _as_it_is(loaded: Any) -> Any:
    return loaded


def shaped(loaded: Any) -> Any:
    """What the user sees: tuples as `Batch`, mappings and everything else as collated."""
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
        return moved if type(value) is dict else _rebuilt(value, moved)
    if isinstance(value, Batch):
        return Batch(to_device(item, device) for item in value)
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if type(value) is tuple:
        return tuple(to_device(item, device) for item in value)
    return value


def _rebuilt(original: Mapping[str, Any], moved: dict[str, Any]) -> Any:
    if hasattr(original, "to"):
        return original.to(next((v.device for v in moved.values() if hasattr(v, "device")), "cpu"))
    return moved


def _tag(batch: LogicalBatch, part: Part, *, completes: bool) -> PhysicalBatch:
    return PhysicalBatch(
        step=batch.step,
        size=part.counted,
        rows=len(part.records),
        completes=completes,
        data=None,
        part=part,
    )
