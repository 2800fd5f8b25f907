"""The privacy card of a plan: its claims, and what was planned in the card's words."""

from __future__ import annotations

import math

from shuffled_dpsgd.accounting.exactness import STATEMENT, is_exact
from shuffled_dpsgd.permutation import PermutationSpec
from shuffled_dpsgd.training.card import NOT_COVERED, PrivacyCard
from shuffled_dpsgd.training.plan import PrivacyPlan

TARGET_KINDS = {
    "certified": "proven",
    "rdp": "proven, by Rényi DP, which is looser than the certified ε",
    "paper": "heuristic, the paper's estimate",
}


def write_card(
    plan: PrivacyPlan,
    *,
    num_steps: int,
    spec: PermutationSpec | None = None,
    released: bool = True,
    shuffles_verified: int = 0,
    samples_checked: int = 0,
    optimizer: str | None = None,
) -> PrivacyCard:
    """The card of a run that made `num_steps` releases under `plan`.

    `released` says whether a shuffle planned for the release has happened, `shuffles_verified`
    how often the model's outputs were compared before and after one, and `samples_checked` for how
    many samples what was clipped was compared with what each has alone. That number must not depend
    on the records. `optimizer` is the name of the optimizer's class; without it the card does not
    say whether the certified ε is attained.
    """
    return PrivacyCard(
        certified=plan.certified(num_steps),
        why_not_certified=plan.uncertifiable,
        paper=plan.paper_estimate(num_steps),
        paper_by_block=plan.paper_by_block(num_steps),
        audits=(),
        steps_released=num_steps,
        steps_planned=plan.num_steps,
        target=_target(plan),
        accounting=plan.accounting,
        sampler=_sampler(plan),
        mechanism=tuple(_mechanism(plan)),
        shuffle=_shuffle(plan, spec, released=released),
        randomness=_randomness(plan),
        private=_is_private(plan),
        shuffles_verified=shuffles_verified,
        samples_checked=samples_checked,
        exactness=_exactness(plan, num_steps, optimizer),
        not_covered=(*NOT_COVERED, *_large_delta(plan)),
    )


def _is_private(plan: PrivacyPlan) -> bool:
    """Whether noise hides every record at all: it must be there, and gradients bounded."""
    clipped = plan.clip != "none" and math.isfinite(plan.clip_norm)
    return clipped and plan.smallest_noise_multiplier > 0.0


def _target(plan: PrivacyPlan) -> str:
    if plan.epsilon is None:
        return "none: the noise multiplier was given"
    kind = TARGET_KINDS[plan.accounting]
    return f"ε = {plan.epsilon:g} ({kind}) at δ = {plan.delta:.3g} over {plan.num_steps} steps"


def _sampler(plan: PrivacyPlan) -> str:
    if plan.sampling != "poisson":
        return "the user's own batches, unaccounted"
    return (
        f"Poisson, every record joins each batch with probability {plan.sampling_prob:.6g} "
        f"(expected batch {plan.expected_batch_size} of {plan.dataset_size}); "
        f"adjacency {plan.adjacency}"
    )


def _mechanism(plan: PrivacyPlan) -> list[str]:
    clip = f"per-sample clip {plan.clip} at {plan.clip_norm:g} over all trainable parameters"
    unclipped = plan.clip == "none" or math.isinf(plan.clip_norm)
    lines = ["no per-sample clip" if unclipped else clip]
    for block in plan.blocks:
        bound = block.batch_clip_norm
        batch = "no batch clip" if bound is None else f"batch clip {bound:g}"
        lines.append(
            f"block {block.name}: {block.dimension} coordinates, noise multiplier "
            f"{block.noise_multiplier:.6g}, {batch}"
        )
    if plan.falls_back:
        lines.append("Algorithm 1 fell back to plain DP-SGD: shuffling would need more noise")
    return lines


def _shuffle(plan: PrivacyPlan, spec: PermutationSpec | None, *, released: bool) -> str:
    if not plan.permutes or spec is None:
        return "off" if plan.shuffle == "off" else "off (fallback)"
    pending = " (not yet applied)" if plan.shuffle == "at-release" and not released else ""
    return (
        f"{plan.shuffle}{pending}, scope {plan.scope}: "
        f"{spec.moved_parameters} of {spec.total_parameters} "
        f"parameters live in tensors that move, {power_of_ten(spec.log10_group_order)} permutations"
    )


def _exactness(plan: PrivacyPlan, num_steps: int, optimizer: str | None) -> str | None:
    """That the certified epsilon is attained, where the proposition covers the run."""
    if plan.uncertifiable or num_steps == 0:
        return None
    least = min(plan.blocks, key=lambda block: block.noise_multiplier)
    covered = is_exact(
        clip=plan.clip,
        clip_norm=plan.clip_norm,
        batch_clip_norm=least.batch_clip_norm,
        adjacency=plan.adjacency,
        optimizer=optimizer,
    )
    return STATEMENT if covered else None


def power_of_ten(exponent: float) -> str:
    """Ten to the rounded exponent, as it is printed.

    >>> power_of_ten(224.3)
    '10²²⁴'
    """
    return "10" + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _large_delta(plan: PrivacyPlan) -> tuple[str, ...]:
    """What a delta of 1/N or more allows: publishing a record chosen at random meets it."""
    if plan.delta * plan.dataset_size < 1.0:
        return ()
    return (
        f"every single record: δ = {plan.delta:.3g} is not below 1/{plan.dataset_size}, and a "
        "mechanism that publishes one record drawn at random meets such a δ",
    )


def _randomness(plan: PrivacyPlan) -> str:
    if plan.secure:
        return "operating system, fresh for every step; nothing stored can reproduce the noise"
    return "seeded: whoever learns the seed can remove the noise; every claim assumes it is secret"
