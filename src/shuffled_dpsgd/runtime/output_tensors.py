"""The tensors in whatever a model returns: mappings, sequences, dataclasses and plain objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from operator import is_
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
    found: dict[int, Tensor] = {}
    _mapped(output, lambda tensor: found.setdefault(id(tensor), tensor), set(), 0)
    return list(found.values())


def with_tensors(output: Any, others: Mapping[int, Tensor]) -> Any:
    """The same output with tensors, known by their id, replaced by others.

    Tuples are made anew; everything else keeps its identity and is changed in place.
    """
    return _mapped(output, lambda tensor: others.get(id(tensor), tensor), set(), 0)


def _mapped(value: Any, change: Callable[[Tensor], Tensor], seen: set[int], depth: int) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _OPAQUE) or depth > _MAX_DEPTH or id(value) in seen:
        return value
    seen.add(id(value))

    def new(part: Any) -> Any:
        return _mapped(part, change, seen, depth + 1)

    if isinstance(value, Mapping):
        for key in list(value):
            if (part := new(value[key])) is not value[key] and isinstance(value, MutableMapping):
                value[key] = part
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [new(part) for part in value]
        if all(map(is_, parts, value)):
            return value
        if isinstance(value, list):
            value[:] = parts
        elif isinstance(value, tuple):
            # A named tuple takes its parts one by one.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif not isinstance(value, torch.nn.Module) and not callable(value):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in [*getattr(value, "__dict__", {}), *slots]:
            part = getattr(value, name, None)
            if (other := new(part)) is not part:
                object.__setattr__(value, name, other)
    return value


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
