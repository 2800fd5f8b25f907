"""The certified ε is exact: one canary attains it, so no accountant can certify less.

Proposition. Run Algorithm 1 for T steps with Poisson sampling at rate q and flat clipping to c, for
neighbours that differ by one record added or removed, and let the noisy sum (or the weights) of
every step be released. Let G be the group of permutations in use, of any scope, B the block with
the smallest noise σ·c, and let B's batch clip be c' ≥ c or absent. Then the ε(δ) of the algorithm
equals that of the T-fold Poisson-sampled Gaussian mechanism with noise multiplier σ.

Proof. At most: the shuffle is a post-processing, and noise σ·c in every block is the least there
is. At least: let v have norm c, live on B, and be constant along every axis that G permutes, so
P·v = v for all P in G. Let the added record's loss be ⟨v, w⟩, whose gradient is v, and every
other record's zero: losses are arbitrary in the definition, and ⟨v, w⟩ does not change under G.
The clips leave v alone. With b_t the sampling coin and z_t ~ N(0, σ²c²·I), the release of step t is
P_t(b_t·v + z_t) = b_t·v + P_t·z_t, and P_t·z_t is again N(0, σ²c²·I) and independent of P_t. So the
releases with and without the record are the T-fold products of
(1 − q)·N(0, σ²c²·I) + q·N(v, σ²c²·I) and N(0, σ²c²·I): the pair that the accountant prices. ∎

What it does not say: that this is lost by every record of a given model and data set, by the last
weights alone, or by a black box. A bound for those would be about another release than the one the
algorithm makes, or would need assumptions on the data that differential privacy does without.
"""

from __future__ import annotations

STATEMENT = (
    "exact, not merely an upper bound: a gradient that no permutation moves attains it, "
    "so no accountant can certify less for this algorithm as it stands"
)
CONDITIONS = (
    "Poisson sampling",
    "flat clipping to c over all trainable parameters",
    "a batch clip c' of at least c, or none, on the block with the smallest noise",
    "one record added or removed",
    "every step's output released",
)


def is_exact(*, clip: str, clip_norm: float, batch_clip_norm: float | None, adjacency: str) -> bool:
    """Whether the proposition covers a run; `batch_clip_norm` is that of its least noisy block.

    Elsewhere the certified ε still holds, and may or may not be attained.
    """
    unhurt = batch_clip_norm is None or batch_clip_norm >= clip_norm
    return clip == "flat" and unhurt and adjacency == "add-remove"
