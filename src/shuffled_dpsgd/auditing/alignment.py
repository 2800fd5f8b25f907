"""Undo the shuffle of released weights by matching them with weights the adversary knows.

Every group of the permutation spec is a linear assignment problem: slots of the released tensors
against slots of the known ones (weight matching as in Git Re-Basin, Ainsworth et al. 2023). Where
another, still unknown group moves an axis, the tensor is summed over that axis first, which no
permutation changes; so each group can be solved on its own, and no start has to be guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from shuffled_dpsgd.auditing.alignment_costs import Bundle, bundles_of, slot_features
from shuffled_dpsgd.auditing.matching import assign
from shuffled_dpsgd.permutation import (
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
        found[index] = torch.from_numpy(np.asarray(assign(costs[index].cpu().numpy())))
    return found
