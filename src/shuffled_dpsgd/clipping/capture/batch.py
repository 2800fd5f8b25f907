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
from shuffled_dpsgd.clipping.capture.taps import Call, Signature, Spec, Taps


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
    """Captures that left a compiled backward and have not been looked at yet.

    Where settling is replayed nobody needs to; making entries of them takes longer than that. The
    last of the `tensors` may be several, `stacked`.
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


class Batch:
    """The samples of one forward: their number, the calls made, the entries recorded.

    `scale` is what a captured gradient must be multiplied by to be the gradient of that sample's
    own loss (the batch size under a mean, one under a sum). `calls` counts, per slot, those the
    forward made; `captures` describes those a compiled backward has recorded through the operator,
    and `graphs` has the ids of the nodes of autograd, one per compiled graph, that did so.
    `taps` are those of a compiled forward that has them, and `tapped` says whether their gradients
    have come; those wait in `late`. `entries` are filed by group; norm layers wait in `unsummed`
    for others of their kind and then stand in `norm_runs`, many layers with their (L, B, 2, D)
    per-sample gradients.
    `has_losses` says that the backward is one of losses, one for each sample.
    `halves` are this forward's half-precision copies of parameters, by the parameter's id, and
    `inputs` what a compiled forward was called with, and under which autocast, if any.
    """

    __slots__ = (
        "calls",
        "captures",
        "closed",
        "device",
        "entries",
        "factors",
        "graphs",
        "halves",
        "has_losses",
        "inputs",
        "late",
        "norm_runs",
        "phase",
        "scale",
        "signature",
        "size",
        "squares",
        "tapped",
        "taps",
        "unsummed",
        "unsummed_bytes",
    )

    def __init__(self, *, size: int, device: str, slots: int, scale: float) -> None:
        self.size = size
        self.device = device
        self.scale = scale
        self.phase = Phase.ONLY
        self.calls = [0] * slots
        self.captures: dict[Call, tuple[Spec, ...]] = {}
        self.graphs: set[int] = set()
        self.signature: Signature | None = None
        self.taps: Taps | None = None
        self.tapped = False
        self.late: Late | None = None
        self.entries: dict[int, list[Entry]] = {}
        self.squares: dict[int, Tensor] = {}
        self.factors: dict[int, Tensor] = {}
        self.halves: dict[int, Tensor] = {}
        self.inputs: tuple[Any, Any, torch.dtype | None] | None = None
        self.unsummed: list[Entry] = []
        self.unsummed_bytes = 0
        self.norm_runs: list[tuple[list[Slot], Tensor]] = []
        self.closed = False
        self.has_losses = False

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter detached and in `dtype`, from the copies made when the forward began."""
        copy = self.halves.get(id(parameter)) if parameter.dtype is not dtype else None
        return parameter.detach().to(dtype) if copy is None else copy

    def file(self, entry: Entry) -> list[Entry]:
        """Keep an entry; returns all kept so far of its group."""
        found = self.entries.get(entry.slot.group)
        if found is None:
            found = self.entries[entry.slot.group] = []
        found.append(entry)
        return found

    def all_entries(self) -> list[Entry]:
        """Those filed and those that wait for company."""
        return [entry for filed in self.entries.values() for entry in filed] + self.unsummed

    def close(self) -> None:
        """Drop every captured tensor; the batch takes no further backward."""
        self.closed = True
        self.late = None
        self.inputs = None
        self.halves = {}
        self.unsummed = []
        self.norm_runs = []
        self.entries = {}
        self.squares = {}
        self.factors = {}
