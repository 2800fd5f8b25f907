"""Which samples of a padded batch count: the first so many, marked on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class CountedRows:
    """Marks the samples that count, in memory that stays where it is.

    Recorded work reads the marks from there, so that one recording serves every number of counted
    samples of a batch size.
    """

    def __init__(self) -> None:
        self._marks: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def mark(self, size: int, counted: int, device: torch.device) -> Tensor:
        """(size,) truth values, true for the first `counted` samples, until the next call.

        >>> CountedRows().mark(3, 2, torch.device("cpu"))
        tensor([ True,  True, False])
        """
        key = device, size
        if key not in self._marks:
            numbers_B = torch.arange(size, device=device)
            self._marks[key] = numbers_B, torch.empty(size, dtype=torch.bool, device=device)
        numbers_B, marks_B = self._marks[key]
        return torch.lt(numbers_B, counted, out=marks_B)
