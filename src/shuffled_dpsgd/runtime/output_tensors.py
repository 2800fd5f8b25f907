"""The tensors in whatever a model returns: mappings, sequences, dataclasses and plain objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 12
_OPAQUE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type)


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors, each once, in an order that depends on the structure alone.

    >>> from types import SimpleNamespace
    >>> found = SimpleNamespace(logits=torch.zeros(2), extra=[{"loss": torch.zeros(())}])
    >>> [tuple(tensor.shape) for tensor in tensors_in(found)]
    [(2,), ()]
    """
    return list(_walk(output, set(), 0))


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, _OPAQUE) or depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for part in _parts(value):
        yield from _walk(part, seen, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, torch.nn.Module) or callable(value):
        return ()
    return [getattr(value, name, None) for name in _attributes(value)]


def with_tensors(output: Any, others: Mapping[int, Tensor]) -> Any:
    """The same output with tensors, known by their id, replaced by others.

    Tuples are made anew; everything else keeps its identity and is changed in place.
    """
    return _replaced(output, others, set(), 0)


def _replaced(value: Any, others: Mapping[int, Tensor], seen: set[int], depth: int) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, _OPAQUE) or depth > _MAX_DEPTH or id(value) in seen:
        return value
    seen.add(id(value))

    def new(part: Any) -> Any:
        return _replaced(part, others, seen, depth + 1)

    if isinstance(value, MutableMapping):
        for key in list(value):
            if (part := new(value[key])) is not value[key]:
                value[key] = part
    elif isinstance(value, list):
        value[:] = [new(part) for part in value]
    elif isinstance(value, tuple):
        parts = [new(part) for part in value]
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            # A named tuple takes its parts one by one.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif not isinstance(value, torch.nn.Module) and not callable(value):
        for name in _attributes(value):
            part = getattr(value, name, None)
            if (other := new(part)) is not part:
                object.__setattr__(value, name, other)
    return value


def _attributes(value: Any) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}), *slots]


def batch_axes_of(tensor: Tensor, size: int) -> list[int]:
    """The axes that may be the batch's: as long as `size`, or the first with rows for each sample.

    >>> batch_axes_of(torch.zeros(3, 5), 3), batch_axes_of(torch.zeros(5, 3), 3)
    ([0], [1])
    >>> batch_axes_of(torch.zeros(6, 5), 3), batch_axes_of(torch.zeros(5), 3)
    ([0], [])
    """
    exact = [axis for axis, length in enumerate(tensor.shape) if length == size]
    first = tensor.shape[0] if tensor.dim() else 0
    return exact or ([0] if first and size and first % size == 0 else [])
