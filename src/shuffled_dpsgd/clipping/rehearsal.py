"""Rehearses the settling of a batch before its backward has run, so that its kernels are ready.

As soon as a first forward has shown what every layer is given, each kind of layer is settled once
in a thread: with two made-up samples in place of the batch, by the code that the batch itself will
take. Other lengths that are to come are rehearsed after it. Nobody waits for a rehearsal: whoever
needs a kernel waits for that kernel alone. A wrong guess only means that a kernel is compiled
later, when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.batch import Entry
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.norm_sums import UnsummedNorm, settle
from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.clipping.rules.conv import ConvSlot
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot
from shuffled_dpsgd.clipping.rules.linear import LinearSlot
from shuffled_dpsgd.clipping.rules.norms import LayerNormSlot, NormSlot
from shuffled_dpsgd.clipping.rules.tiling import TilingConvSlot
from shuffled_dpsgd.clipping.settle.many_layers import ManyLayers, NormRun
from shuffled_dpsgd.clipping.settle.shared_parameters import LayerGroup
from shuffled_dpsgd.runtime.rehearsals import REHEARSALS, are_whole, may_rehearse

SAMPLES = 2
# Parameters with more numbers than these are settled without a rehearsal.
MOST_NUMBERS = 1 << 27
# Kernels read so many tokens at a time, and what is left of them in powers of two from 16 on.
_CHUNK, _MIN_TAIL = 64, 15
_REHEARSED = (LinearSlot, ConvSlot, EmbeddingSlot, LayerNormSlot)
Filed = list[tuple[LayerGroup, Sequence[Entry]]]
# What this process has rehearsed: another engine finds its kernels there.
_begun: set[Hashable] = set()


class Input(Protocol):
    """The first input of a call."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a slot: the shape of a sample, and its type."""

    slot: Slot
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> Hashable:
        """All that decides which kernels the call takes."""
        shapes = tuple([p.shape for p in self.slot.parameters.values() if p is not None])
        return type(self.slot), self.shape, self.dtype, shapes, tuple(self.slot.names)

    @property
    def label(self) -> Hashable:
        """The same for calls that are likely to take the same kernels: all but widths."""
        length = self.shape[0] if len(self.shape) > 1 or _is_whole(self.dtype) else 1
        chunks = length // _CHUNK, max(_MIN_TAIL, length % _CHUNK - 1).bit_length()
        return type(self.slot), chunks, len(self.shape), self.dtype, tuple(self.slot.names)

    def is_rehearsed(self) -> bool:
        slot = self.slot
        has_batch = not slot.folded and not slot.shared_by_batch and len(self.shape) > 0
        return has_batch and isinstance(slot, _REHEARSED) and not getattr(slot, "pads_first", False)

    def with_length(self, length: int, other: int) -> Call:
        """The call with samples of another length; ids and rows of features have one."""
        has_length = self.shape[:1] == (length,) and (len(self.shape) > 1 or _is_whole(self.dtype))
        shape = (other, *self.shape[1:]) if has_length else self.shape
        return Call(slot=self.slot, shape=shape, dtype=self.dtype)


class Half(Enum):
    """Half of settling; neither needs what the other computes."""

    NORMS = "norms"
    SUMS = "sums"


class Rehearsal:
    """Rehearsals of one engine; `lengths` are those that batches are going to be padded to.

    Its kernels are tried as soon as it is made.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[LayerGroup],
        choose: cost.Chooser,
    ) -> None:
        self.lengths: tuple[int, ...] = ()
        self._groups = groups
        self._choose = choose
        devices = {parameter.device for parameter in parameters.values()}
        alone = len(devices) == 1 and are_whole(parameters.values())
        self._device = devices.pop() if alone else torch.device("cpu")
        if may_rehearse(self._device):
            choices.try_ahead(self._device, needs_of(groups))

    def begin(self, inputs: Mapping[int, Sequence[Input]]) -> None:
        """Rehearse the settling of a forward in which slots were given these inputs, by index."""
        if not may_rehearse(self._device):
            return
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        alike: dict[Hashable, list[tuple[LayerGroup, list[Call]]]] = {}
        found = self._calls(inputs)
        for group, calls in (*found, *self._with_other_lengths(found)):
            key = (self._device, dtype, group.shared, *(call.kind for call in calls))
            if key not in _begun and _is_rehearsed(group, calls):
                _begun.add(key)
                # Kernels seldom depend on widths. Where they do not, the first of several layers
                # has them compiled, and the others find them there.
                label = (group.shared, *(call.label for call in calls))
                alike.setdefault(label, []).append((group, calls))
        for is_urgent in (True, False):  # Batches of other lengths come later.
            some = [layers for layers in alike.values() if (layers[0] in found) is is_urgent]
            # Kernels of sums take longer to compile.
            for half, layers in itertools.product((Half.SUMS, Half.NORMS), some):
                work = partial(rehearse, layers, half, self._choose, self._device, dtype)
                REHEARSALS.add(None, work, self._device, announcement=work, is_urgent=is_urgent)

    def _calls(self, inputs: Mapping[int, Sequence[Input]]) -> list[tuple[LayerGroup, list[Call]]]:
        """The calls of every group that had any."""
        return [
            (group, calls)
            for group in self._groups
            if (calls := [call for slot in group.slots for call in _of(slot, inputs)])
        ]

    def _with_other_lengths(
        self, found: Sequence[tuple[LayerGroup, list[Call]]]
    ) -> Iterator[tuple[LayerGroup, list[Call]]]:
        """The same calls with samples of every other length."""
        length = _length([call for _, calls in found for call in calls])
        for other in self.lengths if length is not None else ():
            assert length is not None
            for group, calls in found:
                yield group, [call.with_length(length, other) for call in calls]


def rehearse(
    layers: Sequence[tuple[LayerGroup, Sequence[Call]]],
    half: Half,
    choose: cost.Chooser,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Settle made-up samples in place of the calls of some groups, one after the other.

    `dtype` is what autocast lowers products to, or None.
    """
    for group, calls in layers:
        entries = [_entry(call, device, dtype) for call in calls]
        for entry in entries:
            if not isinstance(entry.capture, UnsummedNorm):
                entry.capture = entry.slot.decide(entry.capture, choose)
        settled = ManyLayers(*_filed(group, entries), choose)
        if half is Half.NORMS:
            settled.squares()
            continue
        sums = {
            name: torch.empty(shape, device=device, dtype=torch.float32)
            for name, shape in group.shapes.items()
        }
        factors_B = torch.ones(SAMPLES, device=device, dtype=torch.float32)
        for new in (True, False):
            settled.add_sums(factors_B, sums, new)


def needs_of(groups: Sequence[LayerGroup]) -> choices.LayerNeeds:
    """What kernels these layers ask for; those of an unknown kind count as linear maps."""
    slots = [slot for group in groups for slot in group.slots]
    tables = [slot for slot in slots if isinstance(slot, EmbeddingSlot)]
    norm_layers = [slot for slot in slots if isinstance(slot, NormSlot)]
    maps = [slot for slot in slots if not isinstance(slot, EmbeddingSlot | NormSlot)]
    weights = [weight for slot in maps for weight in slot.parameters.values() if weight is not None]
    return choices.LayerNeeds(
        widest=max([length for weight in weights for length in weight.shape], default=0),
        norm_layers=bool(norm_layers),
        tables=bool(tables),
        tied_tables=any(slot.sharing.tied for slot in tables),
    )


def _is_rehearsed(group: LayerGroup, calls: Sequence[Call]) -> bool:
    """Whether stand-ins can be made, with sums that take little memory beside a batch."""
    numbers = sum(shape.numel() for shape in group.shapes.values())
    return numbers <= MOST_NUMBERS and all(call.is_rehearsed() for call in calls)


def _of(slot: Slot, inputs: Mapping[int, Sequence[Input]]) -> list[Call]:
    return [Call(slot=slot, shape=x.shape[1:], dtype=x.dtype) for x in inputs.get(slot.index, ())]


def _length(calls: Sequence[Call]) -> int | None:
    """The length of samples that are ids, if there are such."""
    found = [call.shape[0] for call in calls if len(call.shape) == 1 and _is_whole(call.dtype)]
    return found[0] if found else None


def _entry(call: Call, device: torch.device, dtype: torch.dtype | None) -> Entry:
    """The entry that a call would make, on a copy of its slot, so that the slot is left alone.

    Autocast is off: it would keep copies of the weights, and other threads would see them.
    """
    slot = object.__new__(type(call.slot))
    vars(slot).update(vars(call.slot))
    x = torch.zeros(SAMPLES, *call.shape, device=device, dtype=call.dtype)
    weight = slot.parameters["weight"]
    assert weight is not None
    g = torch.ones_like(slot.plain(x.to(weight.dtype) if x.is_floating_point() else x))
    if isinstance(slot, TilingConvSlot):
        x, g = slot.tiles(x), slot.rows(g)
    if dtype is not None and isinstance(slot, LinearSlot | ConvSlot):
        if g.dtype is not torch.float64:
            x, g = x.to(dtype), g.to(dtype)
        if isinstance(slot, LinearSlot) and slot.padded_outputs != slot.outputs:
            g = g.new_ones(*g.shape[:-1], slot.padded_outputs)
    return Entry(slot, slot.heard(SAMPLES, x, g))


def _filed(
    group: LayerGroup, entries: Sequence[Entry]
) -> tuple[Filed, Callable[[], Sequence[NormRun]]]:
    """The group with its entries, or norm layers that are summed apart."""
    norms = [entry.capture for entry in entries if isinstance(entry.capture, UnsummedNorm)]
    if not norms or group.shared or len(group.names) != 2:
        return [(group, entries)], list

    def norm_runs() -> list[tuple[list[Slot], Tensor]]:
        return [([entries[i].slot for i in run], sums) for run, sums in settle(norms)]

    return [], norm_runs


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex
