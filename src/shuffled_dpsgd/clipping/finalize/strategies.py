"""From the engine's options to how a batch is finalized: the clipping rule, and its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.finalize import clip_functions
from shuffled_dpsgd.clipping.finalize.across_ranks import AcrossRanks
from shuffled_dpsgd.clipping.finalize.layer_by_layer import LayerByLayer
from shuffled_dpsgd.clipping.finalize.schedules import ClippingRule, FinalizeSchedule, WholeGradient
from shuffled_dpsgd.clipping.finalize.shared_parameters import group_slots
from shuffled_dpsgd.clipping.finalize.totals import Totals
from shuffled_dpsgd.runtime.shards import Sharding


def make_schedule(
    slots: Sequence[Slot],
    shapes: Mapping[str, torch.Size],
    owned: Mapping[str, Tensor],
    *,
    clip: str,
    clip_norm: float,
    strategy: str,
    sharding: Sharding | None,
) -> FinalizeSchedule:
    """All layers at once; layer by layer on several ranks, or with a factor for each layer.

    `shapes` are those of whole parameters, `owned` what of them this rank has.
    """
    for slot in slots:
        slot.choose = cost.STRATEGIES[strategy]
    rule = ClippingRule(
        groups=group_slots(slots, shapes),
        choose=cost.STRATEGIES[strategy],
        clip=clip_functions.CLIP_FUNCTIONS[clip],
        clip_norm=clip_norm,
        per_group=clip == "per-layer",
        totals=Totals(owned),
    )
    if sharding is not None and sharding.split is not None:
        return AcrossRanks(rule, sharding.split)
    if sharding is not None and sharding.ranks > 1:
        return LayerByLayer(rule, sharding.scatter)
    if rule.per_group:
        return LayerByLayer(rule, lambda sums: partial(dict, sums))
    return WholeGradient(rule)
