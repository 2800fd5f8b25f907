"""Everything one forward of the model leaves behind until its backward is done."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.captures import Capture
from shuffled_dpsgd.clipping.capture.slot import Slot

# Which call of which part of which slot: (slot index, part, number of the call).
CallKey = tuple[int, int, int]


class Entry(NamedTuple):
    """One call of one slot, seen by the backward."""

    slot: Slot
    capture: Capture


class CompiledForward:
    """What a batch keeps because its forward, or some layers of it, were compiled.

    `inputs` is what the forward was called with, and under which autocast, if any. `recorded` names
    the calls that a compiled backward has recorded. `is_followed` says that it was decided whether
    the batch is checked.
    """

    def __init__(self) -> None:
        self.inputs: tuple[Any, Any, torch.dtype | None] | None = None
        self.is_followed = False
        self.recorded: set[CallKey] = set()


class Pending:
    """What a schedule keeps of a batch until it is finalized.

    `entries` are filed by group. Norm layers wait in `unsummed` for others of their kind; once
    summed they stand in `norm_runs`, many layers with their (L, B, 2, D) per-sample gradients.
    It is `half_done` while some of the batch is in the sums and some is not.
    """

    def __init__(self) -> None:
        self.entries: defaultdict[int, list[Entry]] = defaultdict(list)
        self.unsummed: list[Entry] = []
        self.unsummed_bytes = 0
        self.norm_runs: list[tuple[list[Slot], Tensor]] = []
        self.half_done = False


class CapturedBatch:
    """The samples of one forward, until their backward is done.

    `scale` is what a captured gradient must be multiplied by to be the gradient of that sample's
    own loss: the batch size under a mean, one under a sum. `calls` counts the calls that the
    forward made of each slot. `input_B` is the input of the model that `size` was read off.
    `has_losses` says that the backward is one of losses, one for each sample. Of a padded batch
    only the first `counted` samples count, which `counts_B` marks. What all samples share is given
    to each `rows_per_sample` times.
    """

    def __init__(
        self, *, size: int, device: str, slots: int, scale: float, input_B: Tensor | None = None
    ) -> None:
        self.size = size
        self.input_B = input_B
        self.counted = size
        self.counts_B: Tensor | None = None
        self.rows_per_sample = 1
        self.device = device
        self.scale = scale
        self.calls = [0] * slots
        self.has_losses = False
        self.closed = False
        self.compiled = CompiledForward()
        self.pending = Pending()

    def close(self) -> None:
        """Drop every captured tensor; the batch takes no further backward."""
        self.closed = True
        self.input_B = None
        self.compiled.inputs = None
        self.pending = Pending()
