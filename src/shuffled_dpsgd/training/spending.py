"""The ε spent after each step of a plan: priced for a few step counts, and looked up in between."""

from __future__ import annotations

import bisect
import math

from shuffled_dpsgd.accounting import PrivacyClaim, paper_claim
from shuffled_dpsgd.core.certified import claim_of
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.core.pld import price

_KNOTS = 24
_ERROR = 2e-3


class SpendingCurve:
    """Certified claim and paper's estimate after any number of releases of a plan.

    A few step counts are priced, the last as precisely as on a card. In between, the next larger
    one is charged. ε grows with the number of releases, so it is never understated.
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        even = {math.ceil(plan.num_steps * (i / _KNOTS) ** 2) for i in range(1, _KNOTS + 1)}
        self._knots = [0, *sorted(even)]
        whole = plan.certified()
        self._certified = [whole] * len(self._knots)
        if whole is not None:
            self._certified[0] = plan.nothing_released("proven")
            below = whole.epsilon
            for at in range(len(self._knots) - 2, 0, -1):
                run = plan.mechanism(self._knots[at])
                below = min(price(run, plan.delta, _ERROR), below)
                self._certified[at] = claim_of(run, plan.delta, below)
        self._paper = [paper_estimate(plan, knot) for knot in self._knots]

    def certified(self, releases: int) -> PrivacyClaim | None:
        """Spent after at most `releases`; None where nothing can be certified.

        A claim only for runs whose length was fixed at `releases` beforehand.
        """
        return self._certified[bisect.bisect_left(self._knots, releases)]

    def paper(self, releases: int) -> PrivacyClaim | None:
        """The paper's estimate, heuristic, after at most `releases`."""
        return self._paper[bisect.bisect_left(self._knots, releases)]


def paper_estimate(plan: PrivacyPlan, num_steps: int | None = None) -> PrivacyClaim | None:
    """The paper's estimate (heuristic) of the worst block after `num_steps` releases, or all.

    The shuffled block's if they agree to 0.1 %. None where the formula has nothing to say: no
    Poisson sampling, no clipping, no noise.
    """
    claims = list(paper_by_block(plan, num_steps).values())
    worst = max((claim.epsilon for claim in claims), default=0.0)
    return next((claim for claim in claims if claim.epsilon >= 0.999 * worst), None)


def paper_by_block(plan: PrivacyPlan, num_steps: int | None = None) -> dict[str, PrivacyClaim]:
    """The paper's estimate of each block alone, heuristic; empty where there is none.

    The shuffled block is priced with its dimension and batch clip. The rest, and everything in a
    fallback or without a batch clip, is the Gaussian mechanism, d = 1.
    """
    steps = plan.num_steps if num_steps is None else num_steps
    if plan.uncertifiable or plan.largest_batch is not None or plan.bands > 1:
        return {}
    if steps == 0:
        return {block.name: plan.nothing_released("heuristic") for block in plan.blocks}
    return {
        block.name: paper_claim(
            noise_multiplier=block.noise_multiplier,
            sampling_prob=plan.sampling_prob,
            num_steps=steps,
            delta=plan.delta,
            dimension=paper_dimension(plan, block),
            batch_clip=(block.batch_clip_norm or plan.clip_norm) / plan.clip_norm,
            delta_split=plan.delta_split,
        )
        for block in plan.blocks
    }


def paper_dimension(plan: PrivacyPlan, block: NoiseBlock) -> int:
    """The `d` the paper's formula is evaluated at for a block."""
    counted = plan.permutes and block.name == "shuffled" and block.batch_clip_norm is not None
    return block.dimension if counted else 1
