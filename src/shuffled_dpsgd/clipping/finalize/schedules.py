"""When norms and sums are computed: for all layers at once, or layer by layer.

A schedule turns the entries of a batch into running totals when its backward ends. Both compute the
same sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry, Pending
from shuffled_dpsgd.clipping.capture.captures import UnsummedNorm
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.finalize.clip_functions import ClipFunction
from shuffled_dpsgd.clipping.finalize.many_layers import ManyLayers
from shuffled_dpsgd.clipping.finalize.shared_parameters import LayerGroup
from shuffled_dpsgd.clipping.finalize.totals import Totals
from shuffled_dpsgd.clipping.kernels import norm_layers
from shuffled_dpsgd.clipping.kernels.float32 import full_float32


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


class FinalizeSchedule(ABC):
    """Turns a batch's entries into totals, by its `rule`."""

    def __init__(self, rule: ClippingRule) -> None:
        self.rule = rule

    def sum_early(self, pending: Pending) -> None:  # noqa: B027
        """Sum norm layers that wait for others, and hold much memory by now, where that may be."""

    def finish(self, batch: CapturedBatch) -> None:
        """Finalize the batch, after its backward."""
        norms_B = self._finalize(batch)
        self.rule.totals.norms.append(norms_B[: batch.counted])
        batch.close()

    @abstractmethod
    def _finalize(self, batch: CapturedBatch) -> Tensor:
        """Add the batch's clipped gradients to the totals; returns the samples' norms."""


class WholeGradient(FinalizeSchedule):
    """One factor per sample, from the norm over all groups."""

    def sum_early(self, pending: Pending) -> None:
        pending.norm_runs += summed_norms(pending.unsummed)
        pending.unsummed, pending.unsummed_bytes = [], 0

    @full_float32()
    def _finalize(self, batch: CapturedBatch) -> Tensor:
        rule, kept = self.rule, batch.pending
        filed = [(rule.groups[index], entries) for index, entries in kept.entries.items()]
        layers = ManyLayers(
            filed, lambda: [*kept.norm_runs, *summed_norms(kept.unsummed)], rule.choose
        )
        with rule.totals.adding() as (sums, new):
            norms_B = rule.norms(layers.squares(), batch)
            layers.add_sums(rule.factors(norms_B, batch), sums, new)
        return norms_B


def summed_norms(waiting: Sequence[Entry]) -> list[tuple[list[Slot], Tensor]]:
    """The per-sample gradients of norm layers, found together because each is little work."""
    norms = [cast(UnsummedNorm, entry.capture) for entry in waiting]
    pairs = [(norm.x_BTD, norm.g_BTD) for norm in norms]
    runs = norm_layers.norm_sum_runs(pairs, [norm.eps for norm in norms])
    return [([waiting[i].slot for i in run], sums_LBCD) for run, sums_LBCD in runs]
