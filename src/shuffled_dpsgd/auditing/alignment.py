"""Undo the shuffle of released weights by matching them with weights the adversary knows.

Every group of the permutation spec is a linear assignment problem: slots of the released tensors
against slots of the known ones (weight matching as in Git Re-Basin, Ainsworth et al. 2023). Where
another, still unknown group moves an axis, the tensor is summed over that axis first, which no
permutation changes; so each group can be solved on its own, and no start has to be guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shuffled_dpsgd.auditing.matching import Indices, assign
from shuffled_dpsgd.permutation import (
    Block,
    Group,
    Member,
    Permutation,
    PermutationSpec,
    apply_to_tensors,
    from_groups,
    identity,
)

Tensors = Mapping[str, torch.Tensor]
MOST_REFINEMENTS = 10
STAGES: tuple[tuple[str, ...], ...] = (
    ("residual",),
    ("heads",),
    ("mlp-hidden", "query-key", "value-output", "lora-rank"),
)
"""The residual stream is pinned by the embeddings, whole heads by sums over their dimensions; with
those undone, the remaining groups have all their axes back."""


@dataclass(frozen=True, kw_only=True)
class Realignment:
    """The permutation that was found (on the CPU), and the released tensors with it undone."""

    permutation: Permutation
    tensors: dict[str, torch.Tensor]

    def recovered(self, truth: Permutation) -> float:
        """Share of moving positions that were put back where they came from."""
        return float((self.permutation.packed == truth.packed.cpu()).double().mean())


def realign(spec: PermutationSpec, known: Tensors, released: Tensors) -> Realignment:
    """Find P such that `released` is nearest to P applied to `known`, group by group.

    Stages first, each blind to the groups after it; where there were several, all groups once more
    with nothing summed away, until nothing moves.
    """
    current = {name: tensor.detach().clone() for name, tensor in released.items()}
    total = identity(spec, "cpu")
    unsolved = set(range(len(spec.groups)))
    stages = [{i for i in unsolved if spec.groups[i].kind in kinds} for kinds in STAGES]
    assert unsolved == set().union(*stages), "a kind of group that no stage solves"
    for stage in filter(None, stages):
        total = _undo(spec, stage, unsolved, known, current).then(total)
        unsolved -= stage
    if any(stages[:-1]):
        for _ in range(MOST_REFINEMENTS):
            step = _undo(spec, set(range(len(spec.groups))), set(), known, current)
            if torch.equal(step.packed, identity(spec, "cpu").packed):
                break
            total = step.then(total)
    return Realignment(permutation=total, tensors=current)


def _undo(
    spec: PermutationSpec,
    stage: set[int],
    unsolved: set[int],
    known: Tensors,
    current: dict[str, torch.Tensor],
) -> Permutation:
    """Solve the groups of a stage, undo them in `current`, and return what was undone."""
    solved = [torch.arange(group.size) for group in spec.groups]
    for index in stage:
        slots = _solve(spec, index, unsolved - {index}, known, current)
        # Known slot i lies at slots[i] now, as the shuffle set new[slots[i]] = old[i].
        solved[index] = torch.from_numpy(np.argsort(slots))
    found = from_groups(spec, solved)
    device = next(iter(current.values())).device
    apply_to_tensors(found.inverse().to(device), current)
    return found


def _solve(
    spec: PermutationSpec, index: int, unsolved: set[int], known: Tensors, current: Tensors
) -> Indices:
    group = spec.groups[index]
    cost: torch.Tensor | None = None
    for member in group.members:
        if member.parameter not in current:
            continue
        moving = _moving_axes(spec, unsolved, member)
        inner = any(_acts_inside(spec.groups[other], member) for other in unsolved)
        theirs = slot_features(current[member.parameter], group, member, moving, inner)
        ours = slot_features(known[member.parameter], group, member, moving, inner).to(theirs)
        # Squared distances of rows up to a term that depends on the known row alone.
        part = 0.5 * theirs.square().sum(dim=1) - ours @ theirs.T
        cost = part if cost is None else cost + part
    if cost is None:
        return np.arange(group.size)
    nearest: Indices = cost.argmin(dim=1).cpu().numpy()
    # Where every slot's nearest partner is a different one, that is already the best assignment.
    return nearest if np.unique(nearest).size == group.size else assign(cost.cpu().numpy())


def slot_features(
    tensor: torch.Tensor, group: Group, member: Member, moving: frozenset[int], inner: bool
) -> torch.Tensor:
    """One row of numbers per slot that no unsolved group can change."""
    values = tensor.detach().to(torch.float64)
    summed = sorted(axis for axis in moving if axis != member.axis)
    rows = values.movedim(member.axis, 0)
    if summed:
        kept_first = [axis + 1 if axis < member.axis else axis for axis in summed]
        rows = rows.sum(dim=kept_first)
    positions = _positions(member.block, group.size).to(rows.device)
    slots = rows.reshape(rows.shape[0], -1)[positions]
    return slots.sum(dim=1) if inner else slots.reshape(group.size, -1)


@lru_cache(maxsize=4096)
def _positions(block: Block, size: int) -> torch.Tensor:
    return torch.tensor(block.positions(size))


def _moving_axes(spec: PermutationSpec, unsolved: set[int], member: Member) -> frozenset[int]:
    return frozenset(
        other.axis
        for index in unsolved
        for other in spec.groups[index].members
        if other.parameter == member.parameter
    )


def _acts_inside(group: Group, member: Member) -> bool:
    """Whether `group` moves positions within the slots of `member`."""
    if member.block.width * member.block.repeats == 1:
        return False
    return any(
        other.parameter == member.parameter and other.axis == member.axis for other in group.members
    )
