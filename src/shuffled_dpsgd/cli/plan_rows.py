"""How a privacy plan is shown to people: before a run by `advise`, and as it begins by `train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shuffled_dpsgd.core.plan import PrivacyPlan

CALIBRATED = {
    "certified": "calibrated to the certified ε, which is proven",
    "rdp": "calibrated by Rényi DP, which is proven and looser than the certified ε",
    "paper": "calibrated by the paper's formula, which is heuristic: not a guarantee",
}


def plan_rows(plan: PrivacyPlan, chosen: str | None) -> Iterator[tuple[str, str]]:
    """Steps, what the method chose, the noise of every block, and what it is calibrated to."""
    yield (
        "steps",
        f"{plan.num_steps:,}, Poisson batches of {plan.expected_batch_size:,} expected of "
        f"{plan.dataset_size:,} records (sampling probability {plan.sampling_prob:.4g})",
    )
    if chosen is not None:
        yield "chosen by method", chosen
    for block in plan.blocks:
        name = f"σ ({block.name})"
        if block.name == "rest":
            # Without a shuffle the block `rest` is the whole model.
            name = "σ0 (rest)" if len(plan.blocks) > 1 else "σ"
        clip = block.batch_clip_norm
        batch = "" if clip is None else f", batch clip c' = {clip / plan.clip_norm:g} c"
        yield (
            name,
            f"{block.noise_multiplier:.4g} on {block.dimension:,} coordinates, clip c = "
            f"{plan.clip_norm:g}{batch}",
        )
    if plan.epsilon is not None:
        kind = "heuristic" if plan.accounting == "paper" else "proven"
        yield "target", f"ε = {plan.epsilon:g} ({kind}); {CALIBRATED[plan.accounting]}"
