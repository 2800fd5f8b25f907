"""The card of a run with a shuffle: the core's card, the paper's estimate and what moves."""

from __future__ import annotations

from dataclasses import replace

from shuffled_dpsgd.accounting.exactness import STATEMENT, is_exact
from shuffled_dpsgd.core import card
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import Checks
from shuffled_dpsgd.permutation import PermutationSpec
from shuffled_dpsgd.training.card import PrivacyCard
from shuffled_dpsgd.training.spending import paper_by_block, paper_estimate


def write_card(
    plan: PrivacyPlan,
    *,
    num_steps: int,
    spec: PermutationSpec | None = None,
    released: bool = True,
    shuffles_verified: int = 0,
    samples_checked: int = 0,
    checks: Checks | None = None,
    why_not: tuple[str, ...] = (),
    not_checked: tuple[str, ...] = (),
    optimizer: str | None = None,
) -> PrivacyCard:
    """The card of a run that made `num_steps` releases under `plan`.

    `released` says whether a shuffle planned for the release has happened, `shuffles_verified`
    how often the model's outputs were compared before and after one, and `samples_checked` for how
    many samples what was clipped was compared with what each has among other records. That number
    must not depend on the records. `not_checked` are assumptions that nobody has tried out.
    `optimizer` is the name of the optimizer's class; without it the card does not say whether the
    certified ε is attained.
    """
    covered = num_steps == plan.num_steps and not (plan.uncertifiable or why_not)
    found = card.write_card(
        plan,
        PrivacyCard,
        num_steps=num_steps,
        checks=checks,
        why_not=why_not,
        shuffle=_shuffle(plan, spec, released=released),
        paper=paper_estimate(plan, num_steps and plan.num_steps),
        paper_by_block=paper_by_block(plan, num_steps and plan.num_steps),
        exactness=_exactness(plan, optimizer) if covered else None,
        accounting=plan.accounting,
        shuffles_verified=shuffles_verified,
        samples_checked=samples_checked,
    )
    return replace(found, use_assumptions=(*found.use_assumptions, *not_checked))


def _shuffle(plan: PrivacyPlan, spec: PermutationSpec | None, *, released: bool) -> str:
    if not plan.permutes or spec is None:
        return "off" if plan.shuffle == "off" else "off (fallback)"
    pending = " (not yet applied)" if plan.shuffle == "at-release" and not released else ""
    return (
        f"{plan.shuffle}{pending}, scope {plan.scope}: "
        f"{spec.moved_parameters} of {spec.total_parameters} "
        f"parameters live in tensors that move, {power_of_ten(spec.log10_group_order)} permutations"
    )


def _exactness(plan: PrivacyPlan, optimizer: str | None) -> str | None:
    """That the certified epsilon is attained, where the proposition covers the run."""
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
