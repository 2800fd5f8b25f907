"""What a process sends."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Every collective of this process, FSDP's too: its name, and the bytes it hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, torch.Tensor)]
            given = given or [x for x in tree_leaves(args[:1]) if isinstance(x, torch.Tensor)]
            self.seen.append((func._schema.name, sum(tensor.nbytes for tensor in given)))
        return func(*args, **(kwargs or {}))
