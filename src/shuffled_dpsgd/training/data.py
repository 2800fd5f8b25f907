"""From logical batches of indices to physical batches of tensors.

A logical batch is what Poisson sampling drew; a physical batch is what fits in memory. Tags travel
beside the loader so that the consumer knows which physical batch completes which logical one, and
so that empty logical batches, for which there is nothing to load, are not forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shuffled_dpsgd.errors import InvalidArgumentError


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
    """What the sampler drew for one step."""

    step: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PhysicalBatch:
    """A part of a logical batch; `data` is None when the logical batch is empty."""

    step: int
    size: int
    completes: bool
    data: Any


def physical_batches(
    data: MapStyle,
    logical: Iterable[LogicalBatch],
    *,
    physical_batch_size: int,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    generator: torch.Generator | None = None,
) -> Iterator[PhysicalBatch]:
    """Load logical batches in parts of at most `physical_batch_size`, in order, none skipped."""
    tags: deque[PhysicalBatch] = deque()

    def index_lists() -> Iterator[list[int]]:
        for batch in logical:
            parts = [
                list(batch.indices[start : start + physical_batch_size])
                for start in range(0, len(batch.indices), physical_batch_size)
            ]
            for number, part in enumerate(parts, start=1):
                tags.append(_tag(batch, len(part), completes=number == len(parts)))
                yield part
            if not parts:
                tags.append(_tag(batch, 0, completes=True))

    loader: DataLoader[Any] = DataLoader(
        _checked(data),
        batch_sampler=index_lists(),
        collate_fn=collate or default_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=generator,
    )
    for loaded in loader:
        while tags[0].size == 0:
            yield tags.popleft()
        tag = tags.popleft()
        yield PhysicalBatch(step=tag.step, size=tag.size, completes=tag.completes, data=loaded)
    yield from tags


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


def _tag(batch: LogicalBatch, size: int, *, completes: bool) -> PhysicalBatch:
    return PhysicalBatch(step=batch.step, size=size, completes=completes, data=None)


def _checked(data: MapStyle) -> Dataset[Any]:
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise InvalidArgumentError(
            "data",
            expected="a map-style data set (with len() and indexing)",
            got=type(data).__name__,
            remedy="Poisson sampling needs random access; load streams into a map-style data set",
        )
    return data  # type: ignore[return-value]  # DataLoader only indexes and measures it
