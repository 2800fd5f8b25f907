"""What the slots of permutation groups look like, many groups at a time.

A `Bundle` is one axis of one parameter with all groups of one size that a stage solves on it: the
seventy-two heads of a small BERT are twelve bundles, not seventy-two problems with members each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from shuffled_dpsgd.permutation import Block, Group, Member, PermutationSpec


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Groups of one size on one axis of one parameter.

    `positions` says which positions of the axis each slot of each group owns (group, slot, owned),
    `rows` which of the stage's groups these are. `summed` are the other axes that an unsolved
    group still moves; with `inner` one moves positions within the slots.
    """

    parameter: str
    axis: int
    summed: tuple[int, ...]
    inner: bool
    stage: frozenset[int]
    positions: torch.Tensor = field(compare=False)
    rows: torch.Tensor = field(compare=False)
    width: int
    size: int


Plan = dict[int, tuple[list[int], list[Bundle]]]
"""Size of a group -> the groups of that size, and the bundles that tell about them."""


def slot_features(tensor: torch.Tensor, bundle: Bundle) -> torch.Tensor:
    """One row of numbers per slot that no unsolved group can change (group, slot, number)."""
    rows = tensor.detach().to(torch.float64).movedim(bundle.axis, 0)
    if bundle.summed:
        axis = bundle.axis
        rows = rows.sum(dim=[other + 1 if other < axis else other for other in bundle.summed])
    slots = rows.reshape(rows.shape[0], -1)[bundle.positions]
    return slots.sum(dim=2) if bundle.inner else slots.flatten(2)


def bundles_of(
    spec: PermutationSpec,
    stage: frozenset[int],
    unsolved: frozenset[int],
    device: torch.device,
    present: frozenset[str],
) -> Plan:
    """The bundles of a stage over the parameters that are there, made once for each device.

    The groups of a stage know nothing of the other unsolved ones, among them those of their own
    stage.
    """
    cache = spec.derived["alignment"]
    key = (stage, unsolved, device, present)
    if key not in cache:
        cache[key] = _build(spec, stage, unsolved, device, present)
    plan: Plan = cache[key]
    return plan


def _build(
    spec: PermutationSpec,
    stage: frozenset[int],
    unsolved: frozenset[int],
    device: torch.device,
    present: frozenset[str],
) -> Plan:
    sizes: dict[int, list[int]] = defaultdict(list)
    for index in sorted(stage):
        if any(member.parameter in present for member in spec.groups[index].members):
            sizes[spec.groups[index].size].append(index)
    plan: Plan = {}
    for size, groups in sizes.items():
        alike: dict[tuple[str, int, tuple[int, ...], bool, int], list[tuple[int, Block]]]
        alike = defaultdict(list)
        for row, index in enumerate(groups):
            for member in spec.groups[index].members:
                if member.parameter not in present:
                    continue
                summed, inner = _still_moving(spec, unsolved - {index}, member)
                owned = member.block.width * member.block.repeats
                kind = (member.parameter, member.axis, summed, inner, owned)
                alike[kind].append((row, member.block))
        bundles = [
            Bundle(
                parameter=parameter,
                axis=axis,
                summed=summed,
                inner=inner,
                stage=stage,
                positions=torch.tensor([b.positions(size) for _, b in found], device=device),
                rows=torch.tensor([row for row, _ in found], device=device),
                width=owned,
                size=size,
            )
            for (parameter, axis, summed, inner, owned), found in alike.items()
        ]
        plan[size] = groups, bundles
    return plan


def _still_moving(
    spec: PermutationSpec, unsolved: frozenset[int], member: Member
) -> tuple[tuple[int, ...], bool]:
    """The other axes of the member's parameter that move, and whether its slots do within."""
    acting = [spec.groups[index] for index in unsolved]
    axes = {
        other.axis
        for group in acting
        for other in group.members
        if other.parameter == member.parameter and other.axis != member.axis
    }
    return tuple(sorted(axes)), any(_acts_inside(group, member) for group in acting)


def _acts_inside(group: Group, member: Member) -> bool:
    """Whether `group` moves positions within the slots of `member`."""
    if member.block.width * member.block.repeats == 1:
        return False
    return any(
        other.parameter == member.parameter and other.axis == member.axis for other in group.members
    )
