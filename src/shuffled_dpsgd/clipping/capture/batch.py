"""Everything one forward of the model leaves behind until its backward is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from shuffled_dpsgd.clipping import kernels
from shuffled_dpsgd.clipping.capture.captures import Capture
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.capture.taps import CallKey, Signature, Spec, Taps


class Phase(Enum):
    """Which backward over a batch is running."""

    ONLY = "the only one"
    NORMS = "the first of two: norms"
    SUMS = "the second of two: sums"


class Entry:
    """One call of one slot, seen by the backward."""

    __slots__ = ("capture", "slot")

    def __init__(self, slot: Slot, capture: Capture) -> None:
        self.slot = slot
        self.capture = capture


class Late:
    """Captures as they left a compiled backward, before they are made into entries.

    Making entries takes longer than replaying, and a replay does not need them. With `stacked`, the
    last of the `tensors` is a stack of several.
    """

    __slots__ = ("_calls", "_stacked", "tensors")

    def __init__(
        self,
        calls: Sequence[tuple[Slot, int, slice]],
        tensors: Sequence[Tensor | None],
        *,
        stacked: bool,
    ) -> None:
        self._calls = calls
        self._stacked = stacked
        self.tensors = tensors

    def entries(self) -> Iterator[Entry]:
        """One entry for every call that a loss depends on."""
        tensors = self.tensors
        if self._stacked:
            rows = () if tensors[-1] is None else tensors[-1].unbind(0)
            tensors = (*tensors[:-1], *rows)
        inputs = {slot.index: place.start for slot, part, place in self._calls if part == 0}
        for slot, part, place in self._calls:
            found = [kernels.as_aligned(t) for t in tensors[place] if t is not None]
            if found and part < 0 and place.stop - place.start == 1:
                shared = tensors[inputs[-1 - part]]
                assert shared is not None
                found.insert(0, kernels.as_aligned(shared))
            if found:
                yield Entry(slot, slot.captured(part, found))


class CompiledForward:
    """What a batch keeps because its forward, or some layers of it, were compiled.

    `inputs` is what the forward was called with, and under which autocast, if any; `signature` is
    what the shapes of its captures depend on. `captures` describes the calls that a compiled
    backward has recorded through the operator, and `graphs` holds the ids of the autograd nodes,
    one per compiled graph, that did so. `taps` are those given to the forward, if any. `tapped`
    says whether their gradients have come, which then wait in `late`. `is_followed` says that it
    was decided whether the batch is checked.
    """

    __slots__ = (
        "captures",
        "graphs",
        "inputs",
        "is_followed",
        "late",
        "signature",
        "tapped",
        "taps",
    )

    def __init__(self) -> None:
        self.inputs: tuple[Any, Any, torch.dtype | None] | None = None
        self.is_followed = False
        self.signature: Signature | None = None
        self.captures: dict[CallKey, tuple[Spec, ...]] = {}
        self.graphs: set[int] = set()
        self.taps: Taps | None = None
        self.tapped = False
        self.late: Late | None = None


class Settling:
    """What a schedule keeps of a batch until it is settled.

    `entries` are filed by group. Norm layers wait in `unsummed` for others of their kind; once
    summed they stand in `norm_runs`, many layers with their (L, B, 2, D) per-sample gradients.
    `squares` and `factors` are (B,) squared norms and clip factors by group.
    """

    __slots__ = ("entries", "factors", "norm_runs", "squares", "unsummed", "unsummed_bytes")

    def __init__(self) -> None:
        self.entries: dict[int, list[Entry]] = {}
        self.unsummed: list[Entry] = []
        self.unsummed_bytes = 0
        self.norm_runs: list[tuple[list[Slot], Tensor]] = []
        self.squares: dict[int, Tensor] = {}
        self.factors: dict[int, Tensor] = {}

    def file(self, entry: Entry) -> list[Entry]:
        """Keep an entry; returns all kept so far of its group."""
        group = entry.slot.sharing.group
        found = self.entries.get(group)
        if found is None:
            found = self.entries[group] = []
        found.append(entry)
        return found

    def all_entries(self) -> list[Entry]:
        """Those filed and those that wait for company."""
        return [entry for filed in self.entries.values() for entry in filed] + self.unsummed


class CapturedBatch:
    """The samples of one forward, until their backward is done.

    `scale` is what a captured gradient must be multiplied by to be the gradient of that sample's
    own loss: the batch size under a mean, one under a sum. `calls` counts the calls that the
    forward made of each slot. `input_B` is the input of the model that `size` was read off.
    `has_losses` says that the backward is one of losses, one for each sample. Of a padded batch
    only the first `counted` samples count, which `counts_B` marks.
    """

    __slots__ = (
        "calls",
        "closed",
        "compiled",
        "counted",
        "counts_B",
        "device",
        "has_losses",
        "input_B",
        "phase",
        "scale",
        "settling",
        "size",
    )

    def __init__(
        self, *, size: int, device: str, slots: int, scale: float, input_B: Tensor | None = None
    ) -> None:
        self.size = size
        self.input_B = input_B
        self.counted = size
        self.counts_B: Tensor | None = None
        self.device = device
        self.scale = scale
        self.phase = Phase.ONLY
        self.calls = [0] * slots
        self.has_losses = False
        self.closed = False
        self.compiled = CompiledForward()
        self.settling = Settling()

    def close(self) -> None:
        """Drop every captured tensor; the batch takes no further backward."""
        self.closed = True
        self.input_B = None
        self.compiled.late = self.compiled.inputs = None
        self.settling = Settling()
