"""The guarantee anyone can rely on: the proven ε of a Poisson-sampled Gaussian mechanism.

The shuffle is a post-processing of that mechanism and is credited with nothing. Proof: `pld`.
"""

from __future__ import annotations

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price

METHOD = "PLD"
RELATIVE_ERROR = 5e-5
ASSUMPTIONS = (
    "every example joins each step independently with probability sampling_prob (Poisson)",
    "each example contributes at most clip_norm in Euclidean norm, over all parameters together",
    "Gaussian noise of at least noise_multiplier * clip_norm in every coordinate",
    "shuffling is credited with nothing",
)
BLOCKS = "a step is a block of steps_per_block, of which each example joins one at most"
CUT = "of a larger draw, largest_batch examples are kept, each choice of them equally likely"


def claim_for(mechanism: SampledGaussian, delta: float) -> PrivacyClaim:
    """The proven ε of a run: never below the exact one, mostly about `RELATIVE_ERROR` above it.

    Every step's output is assumed public. With adjacency "replace-one" both neighbouring data sets
    hold the example, with different values, and ε is larger.
    """
    check_delta(delta)
    return claim_of(mechanism, delta, price(mechanism, delta, RELATIVE_ERROR))


def claim_of(mechanism: SampledGaussian, delta: float, epsilon: float) -> PrivacyClaim:
    """The claim that `price` supports, with everything it assumes."""
    relation = f"neighbouring data sets differ by {mechanism.adjacency}"
    special = [CUT] if mechanism.largest_batch else [BLOCKS] if mechanism.steps_per_block else []
    return PrivacyClaim(
        epsilon=epsilon,
        delta=delta,
        method=METHOD,
        kind="proven",
        assumptions=(*ASSUMPTIONS, *special, relation),
        inputs=mechanism.to_json(),
    )
