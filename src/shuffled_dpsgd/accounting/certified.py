"""The certified ε from numbers; what prices it is `core.certified`."""

from __future__ import annotations

from shuffled_dpsgd.core.certified import claim_for
from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian


def certified_claim(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> PrivacyClaim:
    """The proven ε of a run: never below the exact one, and mostly about 5e-5 of it above.

    Holds for one release of any checkpoint and for the release of all of them. With
    `adjacency="replace-one"` both neighbouring data sets hold the example, with different values,
    and ε is larger.
    """
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    return claim_for(mechanism, delta)
