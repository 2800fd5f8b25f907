"""When norms and sums are computed: at the end of the backward, group by group, or in two passes.

A schedule receives every entry of a batch while its backward runs and turns them into running
totals. All schedules compute the same sums; they differ in what they keep and for how long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from shuffled_dpsgd.clipping import kernels
from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry, Phase, Settling
from shuffled_dpsgd.clipping.capture.captures import Capture, UnsummedNorm
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.kernels.float32 import full_float32
from shuffled_dpsgd.clipping.settle.clip_functions import ClipFunction
from shuffled_dpsgd.clipping.settle.many_layers import ManyLayers
from shuffled_dpsgd.clipping.settle.shared_parameters import LayerGroup, Named, contributions_of
from shuffled_dpsgd.clipping.settle.totals import Totals
from shuffled_dpsgd.errors import InvalidArgumentError

# Norm layers wait for each other until their inputs and gradients take this much memory.
_MAX_UNSUMMED_BYTES = 1 << 29


class SettleSchedule(Protocol):
    """Turns a batch's entries into totals, by its `rule`."""

    rule: ClippingRule

    def receive(self, batch: CapturedBatch, slot: Slot, capture: Capture) -> None:
        """Take one call of a slot, during the backward."""
        ...

    def finish(self, batch: CapturedBatch) -> None:
        """Settle what is left, after the backward."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClippingRule:
    """What every schedule needs to know: the groups, how norms are found, how they are clipped.

    With `per_group`, each group is bounded by clip_norm / sqrt(number of groups), so that a
    sample's whole contribution stays within clip_norm.
    """

    groups: Sequence[LayerGroup]
    choose: cost.Chooser
    clip: ClipFunction
    clip_norm: float
    per_group: bool
    totals: Totals

    def norms(self, squares: Iterable[Tensor], batch: CapturedBatch) -> Tensor:
        """(B,) norms from squared parts, in terms of each sample's own loss.

        Samples that do not count get infinite norms, hence a factor of zero under every clip.
        """
        parts = list(squares)
        if len(parts) == 1:
            norms_B = parts[0].sqrt()
        else:
            widest = max((p.dtype for p in parts), key=lambda dtype: torch.finfo(dtype).bits)
            norms_B = torch.stack([part.to(widest) for part in parts]).sum(0).sqrt_()
        norms_B = norms_B if batch.scale == 1.0 else norms_B.mul_(batch.scale)
        counts_B = batch.counts_B
        return norms_B if counts_B is None else torch.where(counts_B, norms_B, math.inf)

    def factors(self, norms_B: Tensor, batch: CapturedBatch) -> Tensor:
        """(B,) factors for captured gradients, which still lack the batch's scale."""
        bound = self.clip_norm
        if self.per_group:
            bound /= math.sqrt(len(self.groups))
        factors_B = self.clip(norms_B, bound)
        return factors_B if batch.scale == 1.0 else factors_B.mul_(batch.scale)


class WholeGradient:
    """Book-keeping: one factor per sample from the norm over all groups, at the backward's end."""

    def __init__(self, rule: ClippingRule) -> None:
        self.rule = rule

    def receive(self, batch: CapturedBatch, slot: Slot, capture: Capture) -> None:
        if type(capture) is UnsummedNorm and waits_for_others(batch, slot):
            self._put_off(batch.settling, slot, capture)
            return
        if slot.fixed_route is None:
            capture = slot.decide(capture, self.rule.choose)
        batch.settling.entries[slot.sharing.group].append(Entry(slot, capture))

    def _put_off(self, kept: Settling, slot: Slot, norm: UnsummedNorm) -> None:
        """Let a norm layer wait for others, unless all that wait hold too much memory by now."""
        kept.unsummed.append(Entry(slot, norm))
        kept.unsummed_bytes += norm.x_BTD.nbytes + norm.g_BTD.nbytes
        if kept.unsummed_bytes > _MAX_UNSUMMED_BYTES:
            kept.norm_runs += summed_norms(kept.unsummed)
            kept.unsummed, kept.unsummed_bytes = [], 0

    def finish(self, batch: CapturedBatch) -> None:
        with self.rule.totals.adding() as (sums, new):
            norms_B = self._settle_all(batch, sums, new)
        self.rule.totals.norms.append(norms_B[: batch.counted])
        batch.close()

    @full_float32()
    def _settle_all(self, batch: CapturedBatch, sums: dict[str, Tensor], new: bool) -> Tensor:
        """Add the batch's clipped gradients to `sums`; returns the samples' norms.

        Sums that are `new` hold nothing yet.
        """
        rule = self.rule
        kept = batch.settling
        filed = [(rule.groups[index], entries) for index, entries in kept.entries.items()]
        layers = ManyLayers(filed, lambda: _norm_runs(kept), rule.choose)
        norms_B = rule.norms(layers.squares(), batch)
        layers.add_sums(rule.factors(norms_B, batch), sums, new)
        return norms_B


def waits_for_others(batch: CapturedBatch, slot: Slot) -> bool:
    """Whether a norm layer's sums may be made together with others': its only call, all its own."""
    return not slot.sharing.shared and batch.calls[slot.index] == 1 and len(slot.names) == 2


def _norm_runs(kept: Settling) -> list[tuple[list[Slot], Tensor]]:
    return [*kept.norm_runs, *summed_norms(kept.unsummed)]


def summed_norms(waiting: Sequence[Entry]) -> list[tuple[list[Slot], Tensor]]:
    """The per-sample gradients of norm layers, found together because each is little work."""
    norms = [cast(UnsummedNorm, entry.capture) for entry in waiting]
    pairs = [(norm.x_BTD, norm.g_BTD) for norm in norms]
    runs = kernels.norm_sum_runs(pairs, [norm.eps for norm in norms])
    return [([waiting[i].slot for i in run], sums_LBCD) for run, sums_LBCD in runs]


class TwoPasses:
    """Ghost clipping: a first backward for the norms, a second for the sums, nothing kept between.

    The second pass weights every layer's gradient by the sample's factor in float32, instead of
    weighting the losses, so that half precision cannot push a contribution over the bound.
    """

    def __init__(self, rule: ClippingRule) -> None:
        self.rule = rule

    def receive(self, batch: CapturedBatch, slot: Slot, capture: Capture) -> None:
        group = self.rule.groups[slot.sharing.group]
        if batch.phase is Phase.SUMS:
            self._add(batch, group, slot.contributions(capture))
            return
        if batch.phase is Phase.ONLY:
            raise InvalidArgumentError(
                "strategy",
                expected="engine.backward(losses), because ghost clipping needs two backwards",
                got="loss.backward() under strategy='ghost'",
                remedy="call engine.backward(losses) or use strategy='bookkeeping'",
            )
        entries = batch.settling.entries[group.index]
        entries.append(Entry(slot, capture))
        if group.is_complete(batch, entries):
            self._settle(batch, group)

    def finish(self, batch: CapturedBatch) -> None:
        if batch.phase is Phase.SUMS:
            batch.close()
            return
        for index in list(batch.settling.entries):
            self._settle(batch, self.rule.groups[index])
        norms_B = self.rule.norms(batch.settling.squares.values(), batch)
        self.rule.totals.norms.append(norms_B[: batch.counted])
        whole_B = self.rule.factors(norms_B, batch)
        for index, squares_B in batch.settling.squares.items():
            batch.settling.factors[index] = (
                self.rule.factors(self.rule.norms([squares_B], batch), batch)
                if self.rule.per_group
                else whole_B
            )

    @full_float32()
    def _settle(self, batch: CapturedBatch, group: LayerGroup) -> None:
        entries = batch.settling.entries.pop(group.index)
        parts = contributions_of(entries)
        batch.settling.squares[group.index] = group.sq_norms(entries, parts, self.rule.choose)

    @full_float32()
    def _add(self, batch: CapturedBatch, group: LayerGroup, parts: Iterable[Named]) -> None:
        factors_B = batch.settling.factors[group.index]
        group.add_sums(parts, factors_B, self.rule.totals.sums)
