"""Which parameters share memory without being one parameter.

Parameters tied as one object are known by several names and move once. Two objects over the same
memory (`head.weight = nn.Parameter(table.weight.data)`) would move twice; entries of one that
coincide cannot move at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

_Extent = tuple[int, int, str]


def entangled(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Names of parameters that share memory, each with the name of one it shares it with.

    A parameter some of whose own entries coincide is entangled with itself.
    """
    found: dict[str, str] = {}
    extents: dict[int, list[_Extent]] = {}
    for name, parameter in parameters.items():
        # Other kinds (sharded, quantised) keep their memory elsewhere, and are refused when moved.
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
            continue
        if not parameter.numel():
            continue
        if any(s == 0 and n > 1 for n, s in zip(parameter.shape, parameter.stride(), strict=True)):
            found[name] = name
        extents.setdefault(parameter.untyped_storage()._cdata, []).append(_extent(name, parameter))
    for together in extents.values():
        reached, holder = -1, ""
        for start, end, name in sorted(together):
            if start < reached:
                found.setdefault(name, holder)
                found.setdefault(holder, name)
            if end > reached:
                reached, holder = end, name
    return found


def _extent(name: str, parameter: nn.Parameter) -> _Extent:
    """First and one past the last element in the storage, counted in bytes."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    last = sum((int(length) - 1) * int(stride) for length, stride in steps)
    start = int(parameter.storage_offset())
    width = parameter.element_size()
    return start * width, (start + last + 1) * width, name
