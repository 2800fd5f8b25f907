"""Which parameters share memory without being one parameter.

Parameters tied as one object are known by several names and move once. Two objects over the same
memory (`head.weight = nn.Parameter(table.weight.data)`) would move twice; entries of one that
coincide cannot move at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def entangled(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Names of parameters that share memory, each with the name of one it shares it with.

    A parameter some of whose own entries coincide is entangled with itself.
    """
    found: dict[str, str] = {}
    extents: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in parameters.items():
        # Other kinds (sharded, quantised) keep their memory elsewhere, and are refused when moved.
        plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided
        if not plain or not parameter.numel():
            continue
        axes = [*zip(parameter.shape, parameter.stride(), strict=True)]
        if any(stride == 0 and length > 1 for length, stride in axes):
            found[name] = name
        # First and one past the last element in the storage, counted in bytes.
        width, start = parameter.element_size(), int(parameter.storage_offset())
        last = start + sum((length - 1) * stride for length, stride in axes)
        extent = start * width, (last + 1) * width, name
        extents.setdefault(parameter.untyped_storage()._cdata, []).append(extent)
    for together in extents.values():
        reached, holder = -1, ""
        for start, end, name in sorted(together):
            if start < reached:
                found.setdefault(name, holder)
                found.setdefault(holder, name)
            if end > reached:
                reached, holder = end, name
    return found
