"""Canaries in the tensors of a real model, each with the adversary that reads it.

The counterparts of `axis` on a permutation spec: the axis is the widest one that a group moves, the
un-permuted tensor the largest that no group touches. A record is a canary too: its gradient goes
through the run's own clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.probes import ModelAttack, Seen
from shuffled_dpsgd.auditing.taps import Tensors
from shuffled_dpsgd.auditing.verdict import ThreatModel
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import PermutationSpec
from shuffled_dpsgd.training.data import shaped, to_device
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining

DRAWS = 32


def inner(left: Tensors, right: Tensors) -> float:
    """Σ ⟨left, right⟩ over the tensors of `left`, in float64."""
    parts = [(t.double() * right[n].to(t.device).double()).sum() for n, t in left.items()]
    return float(torch.stack(parts).sum())


def random_direction(shapes: Tensors, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A unit vector spread evenly over the given tensors."""
    drawn = {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
        for name, t in shapes.items()
    }
    return normalised(drawn)


def normalised(tensors: Tensors) -> dict[str, torch.Tensor]:
    """A user's own direction, scaled to joint norm one."""
    norm = sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5
    if not 0.0 < norm < float("inf"):
        raise InvalidArgumentError("canary", expected="a finite, non-zero direction", got=norm)
    return {name: tensor.double() / norm for name, tensor in tensors.items()}


def step_attacks(weights: Tensors, spec: PermutationSpec | None, *, seed: int) -> list[ModelAttack]:
    """Every adversary that the spec leaves room for, on the trainable tensors `weights`."""
    generator = torch.Generator().manual_seed(seed)
    attacks: list[ModelAttack] = []
    moved = {n: w for n, w in weights.items() if spec is not None and n in spec.moved_names}
    unmoved = {name: tensor for name, tensor in weights.items() if name not in moved}
    if spec is not None and moved:
        parameter = widest_matrix(spec, moved)
        axes = tuple(axis for axis, _ in spec.axes_of[parameter])
        attacks += orbit_attacks(parameter, weights[parameter], axes)
        attacks.append(realigned_attack(random_direction(moved, generator), "random-direction"))
    if unmoved:
        largest = max(unmoved, key=lambda name: unmoved[name].numel())
        canary = random_direction({largest: unmoved[largest]}, generator)
        attacks.append(
            ModelAttack(
                name="un-permuted tensor",
                canary_name="random-direction",
                canary=canary,
                read=lambda seen: inner(canary, {name: seen.shuffled(name) for name in canary}),
            )
        )
    return attacks + noise_attacks(weights, seed=seed)


def orbit_attacks(
    parameter: str, weights: torch.Tensor, axes: tuple[int, ...]
) -> list[ModelAttack]:
    """On the places of a tensor that the shuffle mixes: one entry, their maximum, and their sum.

    `axes` are those that move; along every other axis the last place is read. The canary of the sum
    is a fixed point of every permutation of these axes.
    """
    where = tuple(slice(None) if axis in axes else -1 for axis in range(weights.ndim))

    def canary(count: int | None) -> Tensors:
        found = torch.zeros(weights.shape, dtype=torch.float64, device=weights.device)
        spread = torch.zeros_like(found[where]).flatten()
        spread[:count] = 1.0
        found[where] = spread.view(found[where].shape)
        return {parameter: found / found.norm()}

    dirac, constant = canary(1), canary(None)

    def attack(
        name: str, canary_name: str, canary: Tensors, of: Callable[[torch.Tensor], torch.Tensor]
    ) -> ModelAttack:
        def read(seen: Seen) -> float:
            return float(of(seen.shuffled(parameter)[where].double().flatten()))

        return ModelAttack(name=name, canary_name=canary_name, canary=canary, read=read)

    return [
        attack("fixed index", "dirac", dirac, lambda places: places[0]),
        attack("orbit maximum", "dirac", dirac, lambda places: places.max()),
        attack(
            "axis sum",
            "constant-on-axis",
            constant,
            lambda places: places.sum() / places.numel() ** 0.5,
        ),
    ]


def realigned_attack(
    canary: Tensors, canary_name: str, contribution: Callable[[], Tensors] | None = None
) -> ModelAttack:
    """Re-align the new weights with the old ones, undo the update, and look for the canary."""
    return ModelAttack(
        name="re-alignment against W_t",
        canary_name=canary_name,
        canary=canary,
        read=lambda seen: inner(canary, seen.from_iterates),
        threat_model=ThreatModel.ITERATES,
        contribution=contribution,
    )


def noise_attacks(weights: Tensors, *, seed: int) -> list[ModelAttack]:
    """On the mechanism's output: one direction over all tensors, in one step and between two."""
    canary = random_direction(weights, torch.Generator().manual_seed(seed))
    return [
        noise_attack("noise on all tensors", canary),
        # Finds noise that repeats itself.
        noise_attack("difference of two steps", canary, minus_previous=True),
    ]


def noise_attack(name: str, canary: Tensors, *, minus_previous: bool = False) -> ModelAttack:
    """On the mechanism's output along the canary, less an earlier step's if asked for."""

    def read(seen: Seen) -> float:
        before = inner(canary, seen.previous) if minus_previous else 0.0
        return inner(canary, seen.noisy) - before

    return ModelAttack(
        name=name,
        canary_name="random-direction",
        canary=canary,
        read=read,
        threat_model=ThreatModel.MECHANISM_OUTPUT,
    )


def record_attack(
    private: PrivateTraining,
    record: Any,
    losses: PerSampleLoss,
    collate: Callable[[list[Any]], Any] | None,
    *,
    kind: str,
) -> ModelAttack:
    """A record as the canary, looked for after re-alignment, blocks weighted by their noise.

    Dropout makes its gradient a random one. It is computed anew for every release, as in training;
    the adversary, who knows record and weights, looks for the mean of draws of its own.
    """
    batch = to_device(shaped((collate or default_collate)([record])), private.device)

    def gradient() -> dict[str, torch.Tensor]:
        """The record's clipped gradient at the run's present weights, in units of the clip."""
        with private:
            private.backward(losses(private.model, batch))
            sums = private.engine.clipped_sum()
            found = {name: tensor / private.plan.clip_norm for name, tensor in sums.items()}
            private.discard()
        return found

    mean = {name: tensor.double() / DRAWS for name, tensor in gradient().items()}
    for _ in range(DRAWS - 1):
        for name, tensor in gradient().items():
            mean[name].add_(tensor, alpha=1.0 / DRAWS)
    least = private.plan.smallest_noise_multiplier
    weight = {
        name: (least / block.noise_multiplier) ** 2 if least else 1.0
        for block in private.plan.blocks
        for name in block.parameters
    }
    canary = {name: weight[name] * tensor for name, tensor in mean.items()}
    return realigned_attack(canary, f"{kind} record", gradient)


def widest_matrix(spec: PermutationSpec, moved: Tensors) -> str:
    """A matrix with an axis that the largest group moves as a whole."""
    for group in sorted(spec.groups, key=lambda group: -group.size):
        for member in group.members:
            tensor = moved.get(member.parameter)
            if tensor is not None and tensor.ndim > 1 and tensor.shape[member.axis] == group.size:
                return member.parameter
    raise InvalidArgumentError(
        "spec", expected="a matrix with an axis that one group moves as a whole", got="none"
    )
