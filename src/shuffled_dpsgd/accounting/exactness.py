"""Where the certified ε is attained, so that no accountant who knows no more can certify less.

Let G be the group of permutations in use, of any scope, and V the vectors that every P in G leaves
alone: constant along all permuted axes, and anything on tensors that do not move.

Proposition. Run Algorithm 1 for T steps with Poisson sampling at rate q and flat clipping to c, for
neighbours that differ by one record added or removed. Let B be the block with the smallest noise
σ·c, and let B's batch clip be c' ≥ c or absent. Release the noisy sums of all steps, or all weights
under SGD, with or without momentum and weight decay. Then the certified ε(δ) of T Poisson-sampled
Gaussian mechanisms with noise multiplier σ is the smallest that holds for all models and losses
with these clip, q, σ and T.

Proof. It holds: the shuffle is a post-processing, and noise σ·c in every block is the least there
is. None smaller does: let v in V have norm c and live on B, let one record have the loss ⟨v, w⟩,
whose gradient is v, and let the others have the loss zero. The clips leave v alone. With b_t the
sampling coin and z_t ~ N(0, σ²c²·I) on B, step t's shuffled sum is P_t(b_t·v + z_t) = b_t·v +
P_t·z_t, and P_t·z_t is again N(0, σ²c²·I) and independent of P_t. So the sums with and without the
record are the T-fold products of (1 − q)·N(0, σ²c²·I) + q·N(v, σ²c²·I) and N(0, σ²c²·I): the
pair that the accountant prices. Weights: SGD moves ⟨v, w⟩ and its momentum by a linear recursion
with public coefficients, in which ⟨v, sum⟩ enters with the learning rate. P_t·v = v, so a shuffle
changes neither. Hence the weights of all steps give back ⟨v, sum_t⟩, in which the pair lives. ∎

The loss belongs to the algorithm and not to the data, so this says nothing yet about a given model.
There one needs a record whose clipped gradient has norm c and lies in V. The class bias of a
softmax head is moved by no permutation; `tests/accounting/test_attained.py` gives such a record.

Adam is not covered. Its update is a function of the sum's entries that is not injective, so the
weights need not give the sums back.

Theorem (zero gain on V). Let the loss of every record i be φ_i(⟨v, w⟩), with v in V inside one
block and one parameter group. Let the noise be Gaussian with one variance in each block, the
permutations be independent of everything else, and the optimizer's update commute with G, as
elementwise ones do. Then (⟨v, w_t⟩)_t has the same law with the shuffle and without, whatever the
start. Under SGD, with or without momentum and weight decay, the shuffled release is exactly as
private as the unshuffled one for these losses, at every δ and for every kind of release: the sums,
all weights, or the last weights, from a public start, or from a secret one whose part along v is
independent of the rest (Gaussian initial weights).

Proof. Every gradient, hence every clipped sum, is a multiple of v. Undo the permutations: w̃_t =
(P_{t−1}⋯P_0)^{-1}·w_t. As P·v = v, ⟨v, w̃_t⟩ = ⟨v, w_t⟩ and the gradients at w̃_t are those at w_t.
So w̃ follows the unshuffled training with permuted noise, which given all permutations has the law
of unpermuted noise. That is the first claim. It also says that w̃ is independent of the
permutations, so the shuffled release is a post-processing of the unshuffled one and no less
private. Under SGD the part of w̃ orthogonal to v follows its own noise and start, without the data,
and both are independent of the noise and start along v. So ⟨v, ·⟩ is sufficient for telling data
sets apart without the shuffle. A shuffled release shows ⟨v, ·⟩ as well and is no more private. ∎

So wherever one-dimensional DP-SGD is the worst case, the shuffle gains nothing in the worst case.
The last iterate of non-convex losses is such a place (Annamalai 2024).
"""

from __future__ import annotations

from typing import Literal

Released = Literal["sums", "weights"]

STATEMENT = (
    "exact, not merely an upper bound: a gradient that no permutation moves attains it, so no "
    "accountant that knows only clip, sampling rate, noise and steps can certify less"
)
CONDITIONS = (
    "Poisson sampling",
    "flat clipping to c over all trainable parameters",
    "a batch clip c' of at least c, or none, on the block with the smallest noise",
    "one record added or removed",
    "every step's noisy sums released, or every step's weights under SGD (momentum or not)",
)
LINEAR_OPTIMIZERS = ("sgd",)


def is_exact(
    *,
    clip: str,
    clip_norm: float,
    batch_clip_norm: float | None,
    adjacency: str,
    released: Released = "weights",
    optimizer: str | None = None,
) -> bool:
    """Whether the proposition covers a run; `batch_clip_norm` is that of its least noisy block.

    `optimizer` is the name of the optimizer's class, in any case; None means that it is not known,
    and then only released sums are covered. Elsewhere the certified ε holds, attained or not.
    """
    unhurt = batch_clip_norm is None or batch_clip_norm >= clip_norm
    readable = released == "sums" or (optimizer or "").lower() in LINEAR_OPTIMIZERS
    return clip == "flat" and unhurt and adjacency == "add-remove" and readable
