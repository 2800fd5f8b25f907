"""The paper's own estimate of a plan, heuristic: Theorem 3 with Theorems 22 and 29.

Each block is priced as the paper would: the shuffled one with its dimension and batch clip, the
rest (and everything, in a fallback or without a batch clip) as the Gaussian mechanism, d = 1.
"""

from __future__ import annotations

from shuffled_dpsgd.accounting import PrivacyClaim, paper_claim
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan


def paper_estimate(plan: PrivacyPlan, num_steps: int | None = None) -> PrivacyClaim | None:
    """The worst block's estimate after `num_steps` releases, all of them by default.

    The shuffled block's if they agree to 0.1 %. None where the formula has nothing to say: no
    Poisson sampling, no clipping, no noise.
    """
    claims = list(paper_by_block(plan, num_steps).values())
    if not claims:
        return None
    worst = max(claim.epsilon for claim in claims)
    return next(claim for claim in claims if claim.epsilon >= 0.999 * worst)


def paper_by_block(plan: PrivacyPlan, num_steps: int | None = None) -> dict[str, PrivacyClaim]:
    """The paper's estimate of each block alone, heuristic; empty where there is none."""
    steps = plan.num_steps if num_steps is None else num_steps
    if plan.uncertifiable:
        return {}
    if steps == 0:
        return {block.name: plan.nothing_released("heuristic") for block in plan.blocks}
    return {block.name: _claim(plan, block, steps) for block in plan.blocks}


def paper_dimension(plan: PrivacyPlan, block: NoiseBlock) -> int:
    """The `d` the paper's formula is evaluated at for a block."""
    counted = plan.permutes and block.name == "shuffled" and block.batch_clip_norm is not None
    return block.dimension if counted else 1


def _claim(plan: PrivacyPlan, block: NoiseBlock, steps: int) -> PrivacyClaim:
    clip = block.batch_clip_norm
    return paper_claim(
        noise_multiplier=block.noise_multiplier,
        sampling_prob=plan.sampling_prob,
        num_steps=steps,
        delta=plan.delta,
        dimension=paper_dimension(plan, block),
        batch_clip=1.0 if clip is None else clip / plan.clip_norm,
        delta_split=plan.delta_split,
    )
