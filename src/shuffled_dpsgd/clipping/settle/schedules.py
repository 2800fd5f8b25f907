"""When norms and sums are computed: for all layers at once, or layer by layer.

A schedule receives every entry of a batch while its backward runs, and turns them into running
totals when it ends. Both schedules compute the same sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry
from shuffled_dpsgd.clipping.capture.captures import Capture, UnsummedNorm
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.kernels import norm_layers
from shuffled_dpsgd.clipping.kernels.float32 import full_float32
from shuffled_dpsgd.clipping.settle.clip_functions import ClipFunction
from shuffled_dpsgd.clipping.settle.many_layers import ManyLayers
from shuffled_dpsgd.clipping.settle.shared_parameters import LayerGroup
from shuffled_dpsgd.clipping.settle.totals import Totals


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
        """(B,) norms of samples' own losses; infinite for one that does not count."""
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


class SettleSchedule(ABC):
    """Turns a batch's entries into totals, by its `rule`."""

    # Norm layers wait for each other until their inputs and gradients take this much memory.
    most_waiting: ClassVar[float] = 1 << 29

    def __init__(self, rule: ClippingRule) -> None:
        self.rule = rule

    def receive(self, batch: CapturedBatch, slot: Slot, capture: Capture) -> None:
        """Take one call of a slot, during the backward."""
        if type(capture) is UnsummedNorm and waits_for_others(batch, slot):
            kept = batch.settling
            kept.unsummed.append(Entry(slot, capture))
            kept.unsummed_bytes += capture.x_BTD.nbytes + capture.g_BTD.nbytes
            if kept.unsummed_bytes > self.most_waiting:
                kept.norm_runs += summed_norms(kept.unsummed)
                kept.unsummed, kept.unsummed_bytes = [], 0
            return
        batch.settling.entries[slot.sharing.group].append(Entry(slot, capture))

    def finish(self, batch: CapturedBatch) -> None:
        """Finalize the batch, after its backward."""
        norms_B = self._settle_all(batch)
        self.rule.totals.norms.append(norms_B[: batch.counted])
        batch.close()

    @abstractmethod
    def _settle_all(self, batch: CapturedBatch) -> Tensor:
        """Add the batch's clipped gradients to the totals; returns the samples' norms."""


class WholeGradient(SettleSchedule):
    """One factor per sample, from the norm over all groups."""

    @full_float32()
    def _settle_all(self, batch: CapturedBatch) -> Tensor:
        rule, kept = self.rule, batch.settling
        filed = [(rule.groups[index], entries) for index, entries in kept.entries.items()]
        layers = ManyLayers(
            filed, lambda: [*kept.norm_runs, *summed_norms(kept.unsummed)], rule.choose
        )
        with rule.totals.adding() as (sums, new):
            norms_B = rule.norms(layers.squares(), batch)
            layers.add_sums(rule.factors(norms_B, batch), sums, new)
        return norms_B


def waits_for_others(batch: CapturedBatch, slot: Slot) -> bool:
    """Whether a norm layer's sums may be made together with others': its only call, all its own."""
    return not slot.sharing.shared and batch.calls[slot.index] == 1 and len(slot.names) == 2


def summed_norms(waiting: Sequence[Entry]) -> list[tuple[list[Slot], Tensor]]:
    """The per-sample gradients of norm layers, found together because each is little work."""
    norms = [cast(UnsummedNorm, entry.capture) for entry in waiting]
    pairs = [(norm.x_BTD, norm.g_BTD) for norm in norms]
    runs = norm_layers.norm_sum_runs(pairs, [norm.eps for norm in norms])
    return [([waiting[i].slot for i in run], sums_LBCD) for run, sums_LBCD in runs]
