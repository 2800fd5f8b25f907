"""Epsilon along a run, priced once and looked up at every step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from shuffled_dpsgd.accounting import PrivacyClaim, certified_curve
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.training.paper_estimates import paper_estimate

_KNOTS = 24


class SpendingCurve:
    """Certified claim and paper's estimate after any number of releases of a plan.

    Priced at a few step counts; in between, the next priced count above is charged. Both curves
    grow with the number of releases, so what is shown is never below what is spent.
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        even = {math.ceil(plan.num_steps * (i / _KNOTS) ** 2) for i in range(1, _KNOTS + 1)}
        self._knots = [0, *sorted(even)]
        certified = certified_along(plan, self._knots)
        self._certified: list[PrivacyClaim] | list[None] = certified or [None] * len(self._knots)
        self._paper = [paper_estimate(plan, knot) for knot in self._knots]

    def certified(self, releases: int) -> PrivacyClaim | None:
        """Spent after at most `releases`; None where nothing can be certified.

        A claim only for runs whose length was fixed at `releases` beforehand.
        """
        return self._certified[self._knot(releases)]

    def paper(self, releases: int) -> PrivacyClaim | None:
        """The paper's estimate, heuristic, after at most `releases`."""
        return self._paper[self._knot(releases)]

    def _knot(self, releases: int) -> int:
        return bisect.bisect_left(self._knots, releases)


def certified_along(plan: PrivacyPlan, steps: Sequence[int]) -> list[PrivacyClaim] | None:
    """Proven claims at several step counts, cheap enough for curves and progress displays."""
    if plan.uncertifiable:
        return None
    positive = [step for step in steps if step > 0]
    priced = iter(
        certified_curve(
            noise_multiplier=plan.smallest_noise_multiplier,
            sampling_prob=plan.sampling_prob,
            steps=positive,
            delta=plan.delta,
            adjacency=plan.adjacency,
        )
        if positive
        else ()
    )
    return [next(priced) if step > 0 else plan.nothing_released("proven") for step in steps]
