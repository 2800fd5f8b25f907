"""Undo the shuffle of released weights by matching them with weights the adversary knows.

Every group of the permutation spec is a linear assignment problem: slots of the released tensors
against slots of the known ones (weight matching as in Git Re-Basin, Ainsworth et al. 2023). Where
another, still unknown group moves an axis, the tensor is summed over that axis first, which no
permutation changes; so each group can be solved on its own, and no start has to be guessed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from scipy.optimize import linear_sum_assignment

from shuffled_dpsgd.auditing.taps import Tensors
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

MOST_REFINEMENTS = 10
STAGES: tuple[tuple[str, ...], ...] = (
    ("residual",),
    ("heads",),
    ("mlp-hidden", "query-key", "value-output", "lora-rank"),
)
"""The residual stream is pinned by the embeddings, whole heads by sums over their dimensions; with
those undone, the remaining groups have all their axes back."""


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


@dataclass(frozen=True, kw_only=True)
class Realignment:
    """The permutation that was found (on the CPU), and the released tensors with it undone."""

    permutation: Permutation
    tensors: dict[str, torch.Tensor]

    def recovered(self, truth: Permutation) -> float:
        """Share of moving positions that were put back where they came from."""
        return float((self.permutation.packed == truth.packed.cpu()).double().mean())


class Aligner:
    """Matches any number of releases with the same known weights.

    What depends on the known weights alone is computed once, at their first use. Groups of equal
    size are solved together, on the weights' own device.
    """

    def __init__(self, spec: PermutationSpec, known: Tensors) -> None:
        self._spec = spec
        self._known = known
        self._ours: dict[Bundle, torch.Tensor] = {}
        everything = frozenset(range(len(spec.groups)))
        self._stages = [
            frozenset(i for i in everything if spec.groups[i].kind in kinds) for kinds in STAGES
        ]
        assert everything == frozenset().union(*self._stages), "a kind that no stage solves"

    def align(self, released: Tensors) -> Realignment:
        """Find P such that `released` is nearest to P applied to the known weights.

        Stages first, each blind to the groups after it; where there were several, all groups once
        more with nothing summed away, until nothing moves.
        """
        spec = self._spec
        current = {name: tensor.detach().clone() for name, tensor in released.items()}
        total = identity(spec, "cpu")
        unsolved = frozenset(range(len(spec.groups)))
        for stage in filter(None, self._stages):
            total = self._undo(stage, unsolved, current).then(total)
            unsolved -= stage
        if any(self._stages[:-1]):
            everything = frozenset(range(len(spec.groups)))
            for _ in range(MOST_REFINEMENTS):
                step = self._undo(everything, frozenset(), current)
                if torch.equal(step.packed, identity(spec, "cpu").packed):
                    break
                total = step.then(total)
        return Realignment(permutation=total, tensors=current)

    def _undo(
        self, stage: frozenset[int], unsolved: frozenset[int], current: dict[str, torch.Tensor]
    ) -> Permutation:
        """Solve the groups of a stage, undo them in `current`, and return what was undone."""
        spec = self._spec
        solved = [torch.arange(group.size) for group in spec.groups]
        for index, slots in self._solve(stage, unsolved, current).items():
            # Known slot i lies at slots[i] now, as the shuffle set new[slots[i]] = old[i].
            solved[index] = slots.argsort()
        found = from_groups(spec, solved)
        if not torch.equal(found.packed, identity(spec, "cpu").packed):
            device = next(iter(current.values())).device
            apply_to_tensors(found.inverse().to(device), current)
        return found

    def _solve(
        self, stage: frozenset[int], unsolved: frozenset[int], current: Tensors
    ) -> dict[int, torch.Tensor]:
        """The best assignment of every group of the stage that has a tensor here."""
        device = next(iter(current.values())).device
        found: dict[int, torch.Tensor] = {}
        plan = bundles_of(self._spec, stage, unsolved, device, frozenset(current))
        for size, (groups, bundles) in plan.items():
            costs = torch.zeros(len(groups), size, size, dtype=torch.float64, device=device)
            for bundle in bundles:
                theirs = slot_features(current[bundle.parameter], bundle)
                # Squared distances of rows up to a term that depends on the known row alone.
                part = 0.5 * theirs.square().sum(dim=2).unsqueeze(1)
                part = torch.baddbmm(part, self._features(bundle), theirs.mT, alpha=-1.0)
                costs.index_add_(0, bundle.rows, part)
            found.update(zip(groups, _assignments(costs), strict=True))
        return found

    def _features(self, bundle: Bundle) -> torch.Tensor:
        if bundle not in self._ours:
            known = self._known[bundle.parameter].to(bundle.positions.device)
            self._ours[bundle] = slot_features(known, bundle)
        return self._ours[bundle]


def realign(spec: PermutationSpec, known: Tensors, released: Tensors) -> Realignment:
    """Find P such that `released` is nearest to P applied to `known`, group by group."""
    return Aligner(spec, known).align(released)


def _assignments(costs: torch.Tensor) -> torch.Tensor:
    """The column of each row in the cheapest assignment, for every matrix of a stack.

    Where every row's cheapest column is a different one, those are the best assignment already.
    """
    nearest = costs.argmin(dim=2)
    here = torch.arange(costs.shape[1], device=costs.device)
    distinct = (nearest.sort(dim=1).values == here).all(dim=1).cpu()
    found = nearest.cpu()
    for index in (~distinct).nonzero().flatten().tolist():
        found[index] = torch.from_numpy(linear_sum_assignment(costs[index].cpu().numpy())[1])
    return found


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
