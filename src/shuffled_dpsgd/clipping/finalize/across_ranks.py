"""Finalizing where layers are split over ranks: a sample's norm has a part on each of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.finalize.layer_by_layer import LayerByLayer
from shuffled_dpsgd.clipping.finalize.schedules import ClippingRule
from shuffled_dpsgd.clipping.kernels.float32 import full_float32
from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import SplitLayers

# How far the ranks' squared norms of the same gradients may be apart, relative to the whole.
_ROOM = 1e-4


class AcrossRanks(LayerByLayer):
    """All ranks have the same samples, and each has its part of their gradients.

    The squared norms of what is split are added up over ranks before any factor is known. Of what
    is not split every rank has the whole gradient, and that of one rank counts.
    """

    def __init__(self, rule: ClippingRule, split: SplitLayers) -> None:
        super().__init__(rule, lambda sums: partial(dict, sums))
        in_parts = [group for group in rule.groups if split.names & {*group.names}]
        self._halves = in_parts, [group for group in rule.groups if group not in in_parts]
        self._split = split

    @full_float32()
    def _finalize(self, batch: CapturedBatch) -> Tensor:
        rule, sums = self.rule, self.rule.totals.sums
        halves = [self._layers(half, batch) for half in self._halves]
        zero_B = torch.zeros(batch.size, device=next(iter(sums.values())).device)
        split_B, same_B = (sum(layers.squares(), zero_B) for layers in halves)
        own_B = split_B + same_B * int(self._split.leads)
        whole_B, of_all_B = self._split.total(torch.stack([own_B, same_B.to(own_B)])).unbind()
        apart_B = (same_B - of_all_B / self._split.ranks).abs() > _ROOM * whole_B
        if bool(apart_B.any()):
            raise UnsupportedModuleError(
                "",
                expected="layers that are not split to compute the same on every rank",
                got="gradients of such a layer that differ between ranks",
                remedy="split by RowwiseParallel whatever follows a ColwiseParallel layer, and "
                "keep other trained layers, such as norms of single heads, from between the two",
            )
        norms_B = rule.norms([whole_B], batch)
        factors_B = rule.factors(norms_B, batch)
        # Parts of this batch are in the sums from now on, until all of them are.
        batch.pending.half_done = True
        for layers in halves if self._split.leads else halves[:1]:
            layers.add_sums(factors_B, sums)
        return norms_B
