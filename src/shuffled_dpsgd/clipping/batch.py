"""Everything one forward of the model leaves behind until its backward is done."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shuffled_dpsgd.clipping import cost
from shuffled_dpsgd.clipping.captures import Contribution
from shuffled_dpsgd.clipping.rules.base import Saved, Slot


class Entry:
    """One call of one slot, seen by the backward."""

    __slots__ = ("saved", "slot")

    def __init__(self, slot: Slot, saved: Saved) -> None:
        self.slot = slot
        self.saved = saved

    def contributions(self) -> Iterable[tuple[str, Contribution]]:
        return self.slot.contributions(self.saved)

    def sq_norms(self, choose: cost.Chooser) -> Tensor:
        return self.slot.sq_norms(self.saved, choose)


class Batch:
    """The samples of one forward: their number, the calls made, the entries recorded.

    `scale` is what a captured gradient must be multiplied by to be the gradient of that sample's
    own loss (the batch size under a mean, one under a sum).
    """

    __slots__ = ("calls", "closed", "device", "entries", "scale", "size")

    def __init__(self, *, size: int, device: str, slots: int, scale: float) -> None:
        self.size = size
        self.device = device
        self.scale = scale
        self.calls = [0] * slots
        self.entries: list[Entry] = []
        self.closed = False
