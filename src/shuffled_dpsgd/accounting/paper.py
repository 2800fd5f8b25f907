"""The paper's accountant: Theorem 3 inside a step, then sampling and composition. Heuristic.

Nothing here is a guarantee for d > 1: the theorem bounds δ from the wrong side and fails on its own
worst-case pair (docs/claims.md, `shuffled-dpsgd examine`). It is implemented faithfully because the
paper's experiments are calibrated with it. Sampling and composition themselves are proven (Steinke
2022, Theorems 22 and 29), so at d = 1 all of it is.

Legend: (ε_s, δ_s) of the mechanism inside a step, before sampling; δ' the part of δ spent on
composition, a `share` of it; T num_steps; q sampling_prob.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from shuffled_dpsgd.accounting.calibration import check_epsilon
from shuffled_dpsgd.accounting.theorem import check_theorem, smallest_epsilon, smallest_sigma
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.events import check_delta, check_noise_multiplier, check_sampling
from shuffled_dpsgd.errors import InvalidArgumentError

METHOD = "paper's theorem 3"
# A large batch clip makes the theorem the unshuffled formula up to rounding: no gain, so fall back.
ROUNDING = 1e-9
ASSUMPTIONS = (
    "the paper's theorem 3, which approximates a lower bound of delta and so proves nothing",
    "all d coordinates are shuffled by one uniform permutation of d elements",
    "the summed gradient of the shuffled block is clipped to batch_clip * clip_norm",
    "coordinates that do not move received the unshuffled noise multiplier",
    "advanced composition and amplification by Poisson sampling (Steinke 2022, Thms. 22 and 29)",
)


def compose(step_epsilon: float, num_steps: int, slack: float) -> float:
    """ε of T steps of ε each: the better of basic and advanced composition (Thm. 22).

    `slack` is δ'; the composed δ is T·δ_step + δ'.
    """
    square = num_steps * step_epsilon * step_epsilon
    advanced = 0.5 * square + math.sqrt(2.0 * square * math.log(1.0 / slack))
    return min(num_steps * step_epsilon, advanced)


def decompose(epsilon: float, num_steps: int, slack: float) -> float:
    """The per-step ε whose T-fold `compose` is exactly `epsilon`.

    >>> round(compose(decompose(1.0, 500, 2.5e-6), 500, 2.5e-6), 12)
    1.0
    """
    root = math.sqrt(2.0 * num_steps * math.log(1.0 / slack))
    # The positive root of T/2·e² + root·e − ε, in the form that does not cancel.
    advanced = 2.0 * epsilon / (root + math.sqrt(root * root + 2.0 * num_steps * epsilon))
    return max(epsilon / num_steps, advanced)


def amplify(step_epsilon: float, sampling_prob: float) -> float:
    """ε after Poisson sampling (Thm. 29): log(1 + q(e^ε − 1)), without overflow."""
    if sampling_prob == 1.0:
        return step_epsilon
    if step_epsilon > 30.0:
        log_q = math.log(sampling_prob)
        rest = math.log1p(math.exp(-step_epsilon - log_q) * (1.0 - sampling_prob))
        return step_epsilon + log_q + rest
    return math.log1p(sampling_prob * math.expm1(step_epsilon))


def unamplify(step_epsilon: float, sampling_prob: float) -> float:
    """The ε before sampling that `amplify` brings to `step_epsilon`.

    >>> round(amplify(unamplify(0.3, 0.02), 0.02), 12)
    0.3
    """
    if sampling_prob == 1.0:
        return step_epsilon
    if step_epsilon > 30.0:
        rest = math.log1p(-(1.0 - sampling_prob) * math.exp(-step_epsilon))
        return step_epsilon + rest - math.log(sampling_prob)
    return math.log1p(math.expm1(step_epsilon) / sampling_prob)


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


def paper_claim(*, noise_multiplier: float, **run: Any) -> PrivacyClaim:
    """The paper's ε with this noise for a `run`, the fields of a `PaperRun`. Always heuristic.

    If the theorem gives more than the unshuffled mechanism does at the same noise, the unshuffled
    value is reported and `inputs["falls_back"]` is true, as in Algorithm 1.
    """
    facts = PaperRun(**run)
    check_noise_multiplier(noise_multiplier)
    if noise_multiplier == 0.0:
        return facts.claim(math.inf, noise_multiplier=0.0)
    inside, unshuffled = (
        facts.step_epsilon(noise_multiplier),
        facts.step_epsilon(noise_multiplier, 1),
    )
    falls_back = facts.epsilon(inside) >= facts.epsilon(unshuffled) * (1.0 - ROUNDING)
    step_epsilon = unshuffled if falls_back else inside
    return facts.claim(
        facts.epsilon(step_epsilon),
        noise_multiplier=noise_multiplier,
        step_epsilon=step_epsilon,
        step_delta=facts.step_delta,
        falls_back=falls_back,
    )


def calibrate_paper(*, epsilon: float, **run: Any) -> PaperCalibration:
    """σ for the shuffled block and σ0 for the rest, so that the paper's ε of a `run` is `epsilon`.

    Both come from one per-step budget.
    """
    check_epsilon(epsilon)
    facts = PaperRun(**run)
    theorem, unshuffled = facts.noise(epsilon), facts.noise(epsilon, 1)
    falls_back = theorem >= unshuffled * (1.0 - ROUNDING)
    found: dict[str, Any] = {
        "noise_multiplier": unshuffled if falls_back else theorem,
        "unshuffled_noise_multiplier": unshuffled,
        "step_epsilon": facts.step_budget(epsilon),
        "step_delta": facts.step_delta,
        "falls_back": falls_back,
    }
    return PaperCalibration(
        theorem_noise_multiplier=theorem,
        delta_split=facts.delta_split,
        claim=facts.claim(epsilon, **found),
        **found,
    )


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """The facts of a run, and the route from its noise to its ε and back.

    `delta_split` is the share of δ that composition takes. Where a method takes a `dimension`, it
    is d unless given, and 1 for coordinates that do not move.
    """

    sampling_prob: float
    num_steps: int
    delta: float
    dimension: int
    batch_clip: float
    delta_split: float = 0.5

    def __post_init__(self) -> None:
        check_sampling(self.sampling_prob, self.num_steps)
        check_delta(self.delta)
        check_theorem(self.dimension, self.batch_clip)
        if not (isinstance(self.delta_split, float) and 0.0 < self.delta_split < 1.0):
            raise InvalidArgumentError(
                "delta_split",
                expected="a share strictly between 0 and 1",
                got=self.delta_split,
                remedy="0.5 halves delta between composition and the steps",
            )
        if self.step_delta >= 1.0:
            raise InvalidArgumentError(
                "delta_split",
                expected="a split that leaves each step a delta below 1",
                got=f"{self.delta_split:g}, a step delta of {self.step_delta:.3g}",
                remedy="lower delta, or account for more steps or a larger sampling_prob",
            )

    @property
    def step_delta(self) -> float:
        """δ_s = (δ − δ')/(T·q)."""
        return (1.0 - self.delta_split) * self.delta / (self.num_steps * self.sampling_prob)

    def step_epsilon(self, noise_multiplier: float, dimension: int | None = None) -> float:
        """ε_s with this noise."""
        return smallest_epsilon(
            noise_multiplier,
            self.step_delta,
            dimension=dimension or self.dimension,
            batch_clip=self.batch_clip,
        )

    def epsilon(self, step_epsilon: float) -> float:
        """ε of the run with this ε_s: sampling, then composition."""
        sampled = amplify(step_epsilon, self.sampling_prob)
        return compose(sampled, self.num_steps, self.delta_split * self.delta)

    def step_budget(self, epsilon: float) -> float:
        """The ε_s that the mechanism inside a step may spend: composition undone, then sampling."""
        sampled = decompose(epsilon, self.num_steps, self.delta_split * self.delta)
        return unamplify(sampled, self.sampling_prob)

    def noise(self, epsilon: float, dimension: int | None = None) -> float:
        """σ for this ε of the run."""
        return smallest_sigma(
            self.step_budget(epsilon),
            self.step_delta,
            dimension=dimension or self.dimension,
            batch_clip=self.batch_clip,
        )

    def claim(self, epsilon: float, **found: Any) -> PrivacyClaim:
        facts = asdict(self)
        del facts["delta"]
        return PrivacyClaim(
            epsilon=epsilon,
            delta=self.delta,
            method=METHOD,
            kind="heuristic",
            assumptions=ASSUMPTIONS,
            inputs={**facts, "adjacency": "add-remove", **found},
        )
