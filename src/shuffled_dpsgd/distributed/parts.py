"""Which coordinates of a release lie on which rank, and where.

The coordinates of all sums of one dtype are numbered through, in the order of the parameters. A
rank's share is a run of those numbers. What noise a coordinate receives depends on its number and
on nothing else, so it does not matter which rank draws it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shuffled_dpsgd.core.clip import sum_dtype
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.runtime.shards import Span


class Numbering:
    """The coordinates of all sums, numbered through per dtype.

    >>> sums = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    >>> numbering = Numbering(sums)
    >>> numbering.totals, numbering.place("b")
    ([10], Place(group=0, first=6))
    """

    def __init__(self, sums: Mapping[str, torch.Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in sums.items()}
        self.dtypes: list[torch.dtype] = []
        self.totals: list[int] = []
        self._firsts: dict[str, tuple[int, int]] = {}
        for name, tensor in sums.items():
            dtype = sum_dtype(tensor.dtype)
            if tensor.numel() and dtype not in self.dtypes:
                self.dtypes.append(dtype)
                self.totals.append(0)
            group = self.dtypes.index(dtype) if dtype in self.dtypes else 0
            first = self.totals[group] if self.totals else 0
            self._firsts[name] = group, first
            if tensor.numel():
                self.totals[group] += tensor.numel()

    def place(self, name: str, low: int = 0) -> Place:
        """Where the coordinates of a parameter lie, from its own number `low` on."""
        group, first = self._firsts[name]
        return Place(group, first + low)

    def names(self, group: int) -> list[str]:
        """The parameters of one dtype, in order."""
        return [name for name, (own, _) in self._firsts.items() if own == group]

    def span(self, name: str, start: int, stop: int) -> Span:
        """Which of a parameter's own coordinates have numbers from `start` to `stop`."""
        first = self._firsts[name][1]
        size = self.shapes[name].numel()
        low = min(max(start - first, 0), size)
        return Span(low, min(max(stop - first, low), size))
