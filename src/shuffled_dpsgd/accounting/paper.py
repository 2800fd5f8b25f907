"""The paper's accountant: Theorem 3 inside a step, then sampling and composition. Heuristic.

Nothing here is a guarantee for d > 1: the theorem bounds δ from the wrong side and fails on its own
worst-case pair (docs/claims.md, `shuffled-dpsgd examine`). It is implemented faithfully because the
paper's experiments are calibrated with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from shuffled_dpsgd.accounting.calibration import check_epsilon
from shuffled_dpsgd.accounting.composition import (
    StepBudget,
    check_split,
    step_budget,
    step_delta,
    total_epsilon,
)
from shuffled_dpsgd.accounting.theorem import check_theorem, smallest_epsilon, smallest_sigma
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.events import check_delta, check_noise_multiplier, check_sampling
from shuffled_dpsgd.errors import InvalidArgumentError

METHOD = "paper's theorem 3"
# A large batch clip makes the theorem the unshuffled formula up to rounding: no gain, so fall back.
ROUNDING = 1e-9
DeltaSplit = float | Literal["optimised"]
ASSUMPTIONS = (
    "the paper's theorem 3, which approximates a lower bound of delta and so proves nothing",
    "all d coordinates are shuffled by one uniform permutation of d elements",
    "the summed gradient of the shuffled block is clipped to batch_clip * clip_norm",
    "coordinates that do not move received the unshuffled noise multiplier",
    "advanced composition and amplification by Poisson sampling (Steinke 2022, Thms. 22 and 29)",
)


@dataclass(frozen=True, kw_only=True)
class PaperCalibration:
    """σ and σ0 by the paper's route.

    `noise_multiplier` is what Algorithm 1 uses for the shuffled block: the theorem's σ, or σ0 when
    the theorem asks for at least as much (`falls_back`). `unshuffled_noise_multiplier` is σ0, for
    every coordinate that does not move. `theorem_noise_multiplier` is the theorem's σ regardless.
    """

    noise_multiplier: float
    unshuffled_noise_multiplier: float
    theorem_noise_multiplier: float
    falls_back: bool
    step_epsilon: float
    step_delta: float
    delta_split: float
    claim: PrivacyClaim

    def to_json(self) -> dict[str, Any]:
        """The claim's data with both noise multipliers and the per-step budget beside it."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        del found["claim"]
        return {**found, **self.claim.to_json()}


def paper_claim(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    dimension: int,
    batch_clip: float,
    delta_split: DeltaSplit = 0.5,
) -> PrivacyClaim:
    """The paper's ε for a run with this noise. Heuristic, whatever the inputs.

    If the theorem gives more than the unshuffled mechanism does at the same noise, the unshuffled
    value is reported and `inputs["falls_back"]` is true, as in Algorithm 1.
    """
    run = _Run(
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        delta=delta,
        dimension=dimension,
        batch_clip=batch_clip,
    )
    check_noise_multiplier(noise_multiplier)
    if noise_multiplier == 0.0:
        return run.claim(math.inf, noise_multiplier=0.0)
    share = _resolve_split(delta_split, lambda s: run.epsilon(noise_multiplier, s, dimension))
    shuffled = run.epsilon(noise_multiplier, share, dimension)
    unshuffled = run.epsilon(noise_multiplier, share, 1)
    falls_back = shuffled >= unshuffled * (1.0 - ROUNDING)
    return run.claim(
        unshuffled if falls_back else shuffled,
        noise_multiplier=noise_multiplier,
        delta_split=share,
        step_epsilon=run.step_epsilon(noise_multiplier, share, 1 if falls_back else dimension),
        step_delta=step_delta(delta, sampling_prob, num_steps, share),
        falls_back=falls_back,
    )


def calibrate_paper(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    dimension: int,
    batch_clip: float,
    delta_split: DeltaSplit = 0.5,
) -> PaperCalibration:
    """σ for the shuffled block and σ0 for the rest, so that the paper's ε is `epsilon`.

    Both come from one per-step budget; an optimised split therefore minimises their product.
    """
    check_epsilon(epsilon)
    run = _Run(
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        delta=delta,
        dimension=dimension,
        batch_clip=batch_clip,
    )
    share = _resolve_split(
        delta_split, lambda s: run.noise(epsilon, s, dimension) * run.noise(epsilon, s, 1)
    )
    theorem, unshuffled = run.noise(epsilon, share, dimension), run.noise(epsilon, share, 1)
    falls_back = theorem >= unshuffled * (1.0 - ROUNDING)
    noise = unshuffled if falls_back else theorem
    budget = run.budget(epsilon, share)
    return PaperCalibration(
        noise_multiplier=noise,
        unshuffled_noise_multiplier=unshuffled,
        theorem_noise_multiplier=theorem,
        falls_back=falls_back,
        step_epsilon=budget.epsilon,
        step_delta=budget.delta,
        delta_split=share,
        claim=run.claim(
            epsilon,
            noise_multiplier=noise,
            unshuffled_noise_multiplier=unshuffled,
            delta_split=share,
            step_epsilon=budget.epsilon,
            step_delta=budget.delta,
            falls_back=falls_back,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The facts of a run that both directions share; `coordinates` is d, or 1 for unshuffled."""

    sampling_prob: float
    num_steps: int
    delta: float
    dimension: int
    batch_clip: float

    def __post_init__(self) -> None:
        check_sampling(self.sampling_prob, self.num_steps)
        check_delta(self.delta)
        check_theorem(self.dimension, self.batch_clip)

    def step_epsilon(self, noise_multiplier: float, share: float, coordinates: int) -> float:
        inner_delta = step_delta(self.delta, self.sampling_prob, self.num_steps, share)
        return smallest_epsilon(
            noise_multiplier, inner_delta, dimension=coordinates, batch_clip=self.batch_clip
        )

    def epsilon(self, noise_multiplier: float, share: float, coordinates: int) -> float:
        return total_epsilon(
            self.step_epsilon(noise_multiplier, share, coordinates),
            delta=self.delta,
            sampling_prob=self.sampling_prob,
            num_steps=self.num_steps,
            delta_split=share,
        )

    def budget(self, epsilon: float, share: float) -> StepBudget:
        return step_budget(
            epsilon=epsilon,
            delta=self.delta,
            sampling_prob=self.sampling_prob,
            num_steps=self.num_steps,
            delta_split=share,
        )

    def noise(self, epsilon: float, share: float, coordinates: int) -> float:
        budget = self.budget(epsilon, share)
        return smallest_sigma(
            budget.epsilon, budget.delta, dimension=coordinates, batch_clip=self.batch_clip
        )

    def claim(self, epsilon: float, **found: Any) -> PrivacyClaim:
        facts = {
            "sampling_prob": self.sampling_prob,
            "num_steps": self.num_steps,
            "adjacency": "add-remove",
            "dimension": self.dimension,
            "batch_clip": self.batch_clip,
        }
        return PrivacyClaim(
            epsilon=epsilon,
            delta=self.delta,
            method=METHOD,
            kind="heuristic",
            assumptions=ASSUMPTIONS,
            inputs={**facts, **found},
        )


def _resolve_split(delta_split: DeltaSplit, cost: Callable[[float], float]) -> float:
    """A fixed share, or the one that minimises `cost` (noise or ε) over the logit of the share."""
    if delta_split == "optimised":
        from scipy.optimize import minimize_scalar

        found = minimize_scalar(
            lambda logit: cost(1.0 / (1.0 + math.exp(-logit))),
            bounds=(-9.0, 9.0),
            method="bounded",
            options={"xatol": 1e-3},
        )
        share = 1.0 / (1.0 + math.exp(-float(found.x)))
        return share if cost(share) <= cost(0.5) else 0.5
    if isinstance(delta_split, str):
        raise InvalidArgumentError(
            "delta_split", expected="a share in (0, 1) or 'optimised'", got=delta_split
        )
    check_split(delta_split)
    return float(delta_split)
