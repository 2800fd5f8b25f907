"""Exact per-sample gradient clipping in one backward pass.

`ClippingEngine` is what training uses; `clipped_sum_reference` computes the same one example at a
time, slowly and with nothing but autograd. Its words (slot, capture, finalize and others)
are defined in `docs/overview.md`.
"""

from __future__ import annotations

from shuffled_dpsgd.clipping.capture.slot import Slot, batch_of, recorder_of
from shuffled_dpsgd.clipping.contributions.kinds import DenseGrad, OuterGrad
from shuffled_dpsgd.clipping.engine import ClippingEngine
from shuffled_dpsgd.clipping.plan import Plan, PlanRow
from shuffled_dpsgd.clipping.reference import ReferenceSum, clipped_sum_reference
from shuffled_dpsgd.clipping.rules import BY_TYPE

__all__ = [
    "BY_TYPE",
    "ClippingEngine",
    "DenseGrad",
    "OuterGrad",
    "Plan",
    "PlanRow",
    "ReferenceSum",
    "Slot",
    "batch_of",
    "clipped_sum_reference",
    "recorder_of",
]
