"""The guarantee anyone can rely on: the proven ε of a Poisson-sampled Gaussian mechanism.

The shuffle is a post-processing of that mechanism and is credited with nothing. Every ε here is an
upper bound on any lattice and includes the error of floats (`pld`); the lattice is chosen to cost
about `RELATIVE_ERROR`.
"""

from __future__ import annotations

from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError

METHOD = "PLD"
RELATIVE_ERROR = 5e-5
SMALLEST_DELTA = 1e-30
ASSUMPTIONS = (
    "every example joins each step independently with probability sampling_prob (Poisson)",
    "each example contributes at most clip_norm in Euclidean norm, over all parameters together",
    "Gaussian noise of at least noise_multiplier * clip_norm in every coordinate",
    "shuffling is credited with nothing",
)


def certified_claim(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> PrivacyClaim:
    """The proven ε of a run: never below the exact one, and about `RELATIVE_ERROR` above it.

    Holds for one release of any checkpoint and for the release of all of them, since every step's
    output is assumed public. With `adjacency="replace-one"` both neighbouring data sets hold the
    example, with different values, and ε is larger.
    """
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    check_certifiable(delta)
    return claim_of(mechanism, delta, price(mechanism, delta, RELATIVE_ERROR))


def claim_of(
    mechanism: SampledGaussian, delta: float, epsilon: float, priced_steps: int | None = None
) -> PrivacyClaim:
    """The claim that `price` supports, with everything it assumes."""
    inputs = mechanism.to_json()
    if priced_steps is not None:
        inputs["priced_num_steps"] = priced_steps
    relation = f"neighbouring data sets differ by {mechanism.adjacency}"
    return PrivacyClaim(
        epsilon=epsilon,
        delta=delta,
        method=METHOD,
        kind="proven",
        assumptions=(*ASSUMPTIONS, relation),
        inputs=inputs,
    )


def check_certifiable(delta: float) -> None:
    """Refuse a δ outside (0, 1), or so small that nobody has compared its ε with another method."""
    check_delta(delta)
    if delta < SMALLEST_DELTA:
        raise InvalidArgumentError(
            "delta",
            expected=f"at least {SMALLEST_DELTA:g}",
            got=delta,
            remedy=f"use delta={SMALLEST_DELTA:g}",
        )
