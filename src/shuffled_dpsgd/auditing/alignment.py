"""Undo the shuffle of released weights by matching them with weights the adversary knows.

Every group of the permutation spec is a linear assignment problem: slots of the released tensors
against slots of the known ones (weight matching as in Git Re-Basin, Ainsworth et al. 2023). Where
another, still unknown group moves an axis, the tensor is summed over that axis first, which no
permutation changes; so each group can be solved on its own, and no start has to be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment

from shuffled_dpsgd.auditing.taps import Tensors, trainable
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import (
    Group,
    Member,
    Permutation,
    PermutationSpec,
    apply_to_tensors,
    draw,
    from_groups,
    identity,
)
from shuffled_dpsgd.training.private import PrivateTraining

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


class Aligner:
    """Matches any number of releases with the same known weights, on their own device.

    What depends on the known weights alone is computed once, at its first use.
    """

    def __init__(self, spec: PermutationSpec, known: Tensors) -> None:
        self._spec = spec
        self._known = known
        self._ours: dict[tuple[int, frozenset[int]], list[tuple[_Slots, torch.Tensor]]] = {}
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
        for index in stage:
            if any(member.parameter in current for member in spec.groups[index].members):
                # Known slot i lies at slots[i] now, as the shuffle set new[slots[i]] = old[i].
                slots = self._solve(index, unsolved - {index}, current)
                solved[index] = slots.argsort()
        found = from_groups(spec, solved)
        if not torch.equal(found.packed, identity(spec, "cpu").packed):
            device = next(iter(current.values())).device
            apply_to_tensors(found.inverse().to(device), current)
        return found

    def _solve(self, index: int, unsolved: frozenset[int], current: Tensors) -> torch.Tensor:
        """The released slot of each known one, in the assignment of least squared distance.

        Where every row's cheapest column is a different one, those are the best assignment already.
        """
        costs = torch.zeros(())
        for slots, ours in self._features(index, unsolved, current):
            theirs = slots.features(current[slots.member.parameter])
            # Squared distances of rows up to a term that depends on the known row alone.
            costs = torch.addmm(0.5 * theirs.square().sum(dim=1), ours, theirs.T, alpha=-1.0) + (
                costs.to(theirs)
            )
        nearest = costs.argmin(dim=1).cpu()
        if nearest.unique().numel() == nearest.numel():
            return nearest
        return torch.from_numpy(linear_sum_assignment(costs.cpu().numpy())[1])

    def _features(
        self, index: int, unsolved: frozenset[int], current: Tensors
    ) -> list[tuple[_Slots, torch.Tensor]]:
        """How to read the slots of a group, and what they hold in the known weights."""
        key = index, unsolved
        if key not in self._ours:
            device = next(iter(current.values())).device
            self._ours[key] = [
                (slots, slots.features(self._known[slots.member.parameter].to(device)))
                for slots in _slots_of(self._spec, index, unsolved, device)
                if slots.member.parameter in current
            ]
        return self._ours[key]


def _slots_of(
    spec: PermutationSpec, index: int, unsolved: frozenset[int], device: torch.device
) -> list[_Slots]:
    """Where the slots of a group lie in each of its members: made once for each device."""
    cache, key = spec.derived["alignment"], (index, unsolved, device)
    if key not in cache:
        group, acting = spec.groups[index], [spec.groups[other] for other in unsolved]
        cache[key] = [_Slots(member, group.size, acting, device) for member in group.members]
    found: list[_Slots] = cache[key]
    return found


class _Slots:
    """Reads the slots of one member of a group, blind to what the `acting` groups still move."""

    def __init__(
        self, member: Member, size: int, acting: list[Group], device: torch.device
    ) -> None:
        self.member, self._size = member, size
        self._positions = torch.tensor(member.block.positions(size), device=device).flatten()
        here = [
            other
            for group in acting
            for other in group.members
            if other.parameter == member.parameter
        ]
        axes = {other.axis for other in here} - {member.axis}
        # The slots' own axis comes first.
        self._summed = sorted(axis + 1 if axis < member.axis else axis for axis in axes)
        owned = member.block.width * member.block.repeats
        self._inner = owned > 1 and any(other.axis == member.axis for other in here)

    def features(self, tensor: torch.Tensor) -> torch.Tensor:
        """One row of numbers per slot that no acting group can change, in float64."""
        rows = tensor.detach().movedim(self.member.axis, 0).index_select(0, self._positions)
        rows = rows.to(torch.float64)
        if self._summed:
            rows = rows.sum(dim=self._summed)
        slots = rows.reshape(self._size, len(self._positions) // self._size, -1)
        return slots.sum(dim=1) if self._inner else slots.flatten(1)


def realign(spec: PermutationSpec, known: Tensors, released: Tensors) -> Realignment:
    """Find P such that `released` is nearest to P applied to `known`, group by group."""
    return Aligner(spec, known).align(released)


class ShuffleFollower:
    """Follows the shuffles of a seeded run: `true` is what they did, `found` what matching says.

    Both are None where nothing can move. `follow` is called after every update: the auditor draws
    the shuffle again from the run's own stream, the adversary matches the weights with the last.
    """

    def __init__(self, private: PrivateTraining) -> None:
        if private.plan.secure and private.plan.permutes:
            raise InvalidArgumentError(
                "seed",
                expected="a seeded run",
                got="operating-system randomness",
                remedy="canaries must move with the shuffle, so the auditor has to know its draws",
            )
        self._private = private
        self._known = trainable(private.model)
        spec = private.spec
        self.true = self.found = None if spec is None else identity(spec, private.device)

    @property
    def recovered(self) -> float:
        """Share of the permuted positions that the adversary knows the place of by now."""
        if self.true is None or self.found is None:
            return 1.0
        return float((self.true.packed == self.found.packed).double().mean())

    def follow(self) -> None:
        private, spec = self._private, self._private.spec
        if not (private.plan.shuffle == "every-step" and private.plan.permutes):
            return
        assert spec is not None
        assert self.true is not None
        assert self.found is not None
        current = trainable(private.model)
        key = private.streams.key("permutation", private.steps_taken - 1)
        self.true = self.true.then(draw(spec, key, private.device))
        step = realign(spec, self._known, current).permutation
        self.found = self.found.then(step.to(private.device))
        self._known = current
