"""Finalizing layer by layer: for per-layer clipping, and for weights spread over several ranks.

Norms need nobody else, because a sample lives on one rank. Once the factors are known, the sums of
a few layers are formed, reduce-scattered while those of the next are formed, and added to the rows
that this rank owns. All ranks go through all layers in the same order, whatever they recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.finalize.many_layers import ManyLayers
from shuffled_dpsgd.clipping.finalize.schedules import ClippingRule, FinalizeSchedule, summed_norms
from shuffled_dpsgd.clipping.finalize.shared_parameters import LayerGroup
from shuffled_dpsgd.clipping.kernels.float32 import full_float32

Scatter = Callable[[Mapping[str, Tensor]], Callable[[], dict[str, Tensor]]]


class LayerByLayer(FinalizeSchedule):
    """One factor per sample and bucket, at the backward's end; `scatter` begins to send sums.

    Without per-layer clipping all buckets have the same factors. No bucket is larger than the
    largest layer.
    """

    def __init__(self, rule: ClippingRule, scatter: Scatter) -> None:
        super().__init__(rule)
        self._scatter = scatter
        self._buckets: list[list[LayerGroup]] = []

    @full_float32()
    def _finalize(self, batch: CapturedBatch) -> Tensor:
        rule, totals = self.rule, self.rule.totals.sums
        self._buckets = self._buckets or list(buckets(rule, totals))
        layers = [self._layers(bucket, batch) for bucket in self._buckets]
        squares = [layer.squares() for layer in layers]
        norms_B = rule.norms([part_B for parts in squares for part_B in parts], batch)
        whole_B = None if rule.per_group else rule.factors(norms_B, batch)
        # Parts of this batch are in the sums from now on, until all of them are.
        batch.pending.half_done = True
        arriving: Callable[[], dict[str, Tensor]] = dict
        for bucket, layer, parts in zip(self._buckets, layers, squares, strict=True):
            sums = {
                name: torch.empty(shape, dtype=totals[name].dtype, device=norms_B.device)
                for group in bucket
                for name, shape in group.shapes.items()
            }
            factors_B = whole_B
            if factors_B is None:
                own_B = rule.norms(parts, batch) if parts else torch.zeros_like(norms_B)
                factors_B = rule.factors(own_B, batch)
            layer.add_sums(factors_B, sums, new=True)
            before, arriving = arriving, self._scatter(sums)
            _add_to(totals, before())
        _add_to(totals, arriving())
        return norms_B

    def _layers(self, bucket: Sequence[LayerGroup], batch: CapturedBatch) -> ManyLayers:
        kept = batch.pending
        indices = {group.index for group in bucket}
        filed = [(group, kept.entries.get(group.index, [])) for group in bucket]
        waiting = [entry for entry in kept.unsummed if entry.slot.group in indices]
        return ManyLayers(
            [(group, entries) for group, entries in filed if entries],
            lambda: summed_norms(waiting),
            self.rule.choose,
        )


def _add_to(totals: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    if own:
        torch._foreach_add_([totals[name] for name in own], list(own.values()))


def buckets(rule: ClippingRule, totals: Mapping[str, Tensor]) -> Iterator[list[LayerGroup]]:
    """The layers in order, together while no larger than the largest; each by itself per layer.

    A bucket has sums of one type.
    """
    sizes = [sum(shape.numel() for shape in group.shapes.values()) for group in rule.groups]
    room = most = 0 if rule.per_group else max(sizes)
    taken: list[LayerGroup] = []
    for group, size in zip(rule.groups, sizes, strict=True):
        dtypes = {totals[name].dtype for member in (*taken, group) for name in member.names}
        if taken and (size > room or len(dtypes) > 1):
            yield taken
            taken, room = [], most
        taken.append(group)
        room -= size
    yield taken
