"""Canaries in the tensors of a real model, each with the adversary that reads it.

The counterparts of `adversaries` on a permutation spec: the axis is the widest one that a group
moves, the un-permuted tensor the largest that no group touches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from shuffled_dpsgd.auditing.adversaries import ThreatModel
from shuffled_dpsgd.auditing.probes import ModelAttack, Seen, Tensors
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import PermutationSpec


class FixedCanary:
    """What joins the sum is what the adversary looks for."""

    canary: Tensors

    def contribution(self) -> Tensors:
        return self.canary


@dataclass(frozen=True, kw_only=True)
class ReadOrbit(FixedCanary):
    """The places of a tensor that the shuffle mixes: a single entry, their maximum, or their sum.

    `axes` are those that move; along every other axis the last place is read.
    """

    name: str
    canary_name: str
    canary: Tensors
    parameter: str
    axes: tuple[int, ...]
    how: Literal["first", "maximum", "sum"]
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def read(self, seen: Seen) -> float:
        tensor = seen.shuffled(self.parameter)
        places = tensor[_places(tensor.ndim, self.axes)].double().flatten()
        if self.how == "first":
            return float(places[0])
        total = places.sum() / places.numel() ** 0.5
        return float(places.max() if self.how == "maximum" else total)


@dataclass(frozen=True, kw_only=True)
class ReadInner(FixedCanary):
    """Inner product with the canary: in the shuffled release, or in what precedes the shuffle."""

    name: str
    canary_name: str
    canary: Tensors
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def read(self, seen: Seen) -> float:
        if self.threat_model is ThreatModel.MECHANISM_OUTPUT:
            return inner(self.canary, seen.noisy)
        return inner(self.canary, {name: seen.shuffled(name) for name in self.canary})


@dataclass(frozen=True, kw_only=True)
class ReadDifference(FixedCanary):
    """Inner product with the difference of two steps: finds noise that repeats itself."""

    canary: Tensors
    name: str = "difference of two steps"
    canary_name: str = "random-direction"
    threat_model: ThreatModel = ThreatModel.MECHANISM_OUTPUT

    def read(self, seen: Seen) -> float:
        return inner(self.canary, seen.noisy) - inner(self.canary, seen.previous)


@dataclass(frozen=True, kw_only=True)
class ReadRealigned(FixedCanary):
    """Re-align the new weights with the old ones, undo the update, and look for the canary."""

    canary: Tensors
    name: str = "re-alignment against W_t"
    canary_name: str = "random-direction"
    threat_model: ThreatModel = ThreatModel.ITERATES

    def read(self, seen: Seen) -> float:
        return inner(self.canary, seen.from_iterates)


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


def invariant_direction(weights: Tensors, names: Collection[str]) -> dict[str, torch.Tensor]:
    """A unit vector constant over each of the named tensors: no permutation of axes moves it.

    The canary for which the shuffled release is the plain Gaussian pair
    (`shuffled_dpsgd.accounting.bracket`).
    """
    return normalised({name: torch.ones_like(weights[name]) for name in names})


def step_attacks(weights: Tensors, spec: PermutationSpec | None, *, seed: int) -> list[ModelAttack]:
    """Every adversary that the spec leaves room for, on the trainable tensors `weights`."""
    generator = torch.Generator().manual_seed(seed)
    attacks: list[ModelAttack] = []
    moved = {n: w for n, w in weights.items() if spec is not None and n in spec.moved_names}
    unmoved = {name: tensor for name, tensor in weights.items() if name not in moved}
    if spec is not None and moved:
        parameter, _ = widest_axis(spec, moved)
        axes = tuple(axis for axis, _ in spec.axes_of[parameter])
        dirac = {parameter: orbit_canary(weights[parameter], axes, 1)}
        constant = {parameter: orbit_canary(weights[parameter], axes, None)}
        orbits: tuple[tuple[str, str, Tensors, Literal["first", "maximum", "sum"]], ...] = (
            ("fixed index", "dirac", dirac, "first"),
            ("orbit maximum", "dirac", dirac, "maximum"),
            ("axis sum", "constant-on-axis", constant, "sum"),
        )
        attacks += [
            ReadOrbit(
                name=name,
                canary_name=kind,
                canary=canary,
                parameter=parameter,
                axes=axes,
                how=how,
            )
            for name, kind, canary, how in orbits
        ]
        attacks.append(ReadRealigned(canary=random_direction(moved, generator)))
    if unmoved:
        largest = max(unmoved, key=lambda name: unmoved[name].numel())
        canary = random_direction({largest: unmoved[largest]}, generator)
        attacks.append(
            ReadInner(name="un-permuted tensor", canary_name="random-direction", canary=canary)
        )
    return attacks + noise_attacks(weights, seed=seed)


def noise_attacks(weights: Tensors, *, seed: int) -> list[ModelAttack]:
    """On the mechanism's output: one direction over all tensors, in one step and between two."""
    canary = random_direction(weights, torch.Generator().manual_seed(seed))
    direct = ReadInner(
        name="noise on all tensors",
        canary_name="random-direction",
        canary=canary,
        threat_model=ThreatModel.MECHANISM_OUTPUT,
    )
    return [direct, ReadDifference(canary=canary)]


def tensor_attacks(weights: Tensors, *, seed: int) -> list[ModelAttack]:
    """One attack per tensor on the mechanism's output: finds noise that is missing somewhere."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ReadInner(
            name=f"noise on {name}",
            canary_name="random-direction",
            canary=random_direction({name: tensor}, generator),
            threat_model=ThreatModel.MECHANISM_OUTPUT,
        )
        for name, tensor in weights.items()
    ]


def widest_axis(spec: PermutationSpec, moved: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Parameter and axis of a matrix that the largest group moves as a whole."""
    for group in sorted(spec.groups, key=lambda group: -group.size):
        for member in group.members:
            tensor = moved.get(member.parameter)
            if tensor is not None and tensor.ndim > 1 and tensor.shape[member.axis] == group.size:
                return member.parameter, member.axis
    raise InvalidArgumentError(
        "spec", expected="a matrix with an axis that one group moves as a whole", got="none"
    )


def orbit_canary(like: torch.Tensor, axes: tuple[int, ...], spikes: int | None) -> torch.Tensor:
    """A unit vector on the places that `axes` span: constant, or on the first `spikes` of them.

    Along every other axis it lies at the last place. The constant one is a fixed point of every
    permutation of these axes.
    """
    canary = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    where = _places(like.ndim, axes)
    spread = torch.zeros_like(canary[where]).flatten()
    spread[:spikes] = 1.0
    canary[where] = spread.view(canary[where].shape)
    return canary / canary.norm()


def _places(ndim: int, axes: tuple[int, ...]) -> tuple[slice | int, ...]:
    """Everything along `axes`, the last place along every other axis."""
    return tuple(slice(None) if axis in axes else -1 for axis in range(ndim))
