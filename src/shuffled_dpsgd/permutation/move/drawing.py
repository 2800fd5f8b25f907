"""Draw a uniform element of a spec's group; compose and invert elements.

A `Permutation` holds one index vector per `AxisLayout`, packed into a single tensor. Every
operation is a handful of kernels whatever the number of groups, and none waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch

from shuffled_dpsgd.core.streams import uniform_keys
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation.move.index_layout import BLOCK, Packing, packing_of
from shuffled_dpsgd.permutation.move.kernel_route import find_kernels
from shuffled_dpsgd.permutation.move.recording import Recording
from shuffled_dpsgd.permutation.spec import PermutationSpec
from shuffled_dpsgd.runtime.backends import took

# The kernel compares every two keys of a group: for larger groups sorting is quicker.
_LARGEST_COMPARED = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class Permutation:
    """An element of the spec's group: new[i] = old[index[i]] along every moving axis."""

    spec: PermutationSpec
    packed: torch.Tensor

    @cached_property
    def indices(self) -> tuple[torch.Tensor, ...]:
        """One index vector per `spec.layouts` entry."""
        return tuple(self.packed.split([layout.size for layout in self.spec.layouts]))

    def index(self, parameter: str, axis: int) -> torch.Tensor:
        """The index vector along one axis of one parameter.

        Raises `InvalidArgumentError` if that axis does not move.
        """
        for moving, layout in self.spec.axes_of.get(parameter, ()):
            if moving == axis:
                return self.indices[layout]
        raise InvalidArgumentError(
            "parameter", expected="an axis that moves", got=(parameter, axis)
        )

    def then(self, other: Permutation) -> Permutation:
        """First self, then `other`: applying the result equals applying both in that order."""
        if other.spec is not self.spec and other.spec != self.spec:
            raise InvalidArgumentError(
                "other", expected="a permutation of the same spec", got="another spec"
            )
        packing = packing_of(self.spec, self.packed.device)
        return Permutation(
            spec=self.spec,
            packed=self.packed[other.packed.to(self.packed.device) + packing.offsets],
        )

    def inverse(self) -> Permutation:
        """The element that undoes this one bit for bit."""
        packing = packing_of(self.spec, self.packed.device)
        here = torch.arange(packing.length, device=self.packed.device) - packing.offsets
        undone = torch.empty_like(self.packed)
        undone[self.packed + packing.offsets] = here
        return Permutation(spec=self.spec, packed=undone)

    def to(self, device: torch.device | str) -> Permutation:
        """The same element with its indices on `device`."""
        packed = self.packed.to(device, non_blocking=True)
        return self if packed is self.packed else Permutation(spec=self.spec, packed=packed)


def identity(spec: PermutationSpec, device: torch.device | str = "cpu") -> Permutation:
    """The element that moves nothing."""
    packing = packing_of(spec, torch.device(device))
    here = torch.arange(packing.length, device=device)
    return Permutation(spec=spec, packed=here - packing.offsets)


def draw(
    spec: PermutationSpec,
    source: torch.Generator | bytes,
    device: torch.device | str | None = None,
) -> Permutation:
    """Draw uniformly from the spec's group; `source` is a key of a run, or a generator.

    From a key the element lies on `device`, from a generator on the generator's own.

    Each group's permutation sorts independent 63-bit keys; two equal keys, the only departure
    from uniformity, have probability below size² / 2⁶⁴ in a group.
    """
    if isinstance(source, torch.Generator):
        device = source.device
    device = torch.device("cpu" if device is None else device)
    packing = packing_of(spec, device)
    keys = torch.empty(packing.slots, dtype=torch.int64, device=device)
    if isinstance(source, torch.Generator):
        keys.random_(generator=source)
    else:
        keys.copy_(torch.from_numpy(uniform_keys(source, packing.slots)))
    compared = 0 < max(packing.by_size, default=0) <= _LARGEST_COMPARED
    code = find_kernels(device) if compared else None
    took("drawing permutations", "plain" if code is None else "triton")
    if code is not None:
        drawing = fused_drawing(spec, device, code)
        drawing.keys.copy_(keys)
        return drawing.result()
    parts = keys.split([size * len(groups) for size, groups in packing.by_size.items()])
    drawn = [
        part.view(-1, size).argsort(dim=1).flatten()
        for part, size in zip(parts, packing.by_size, strict=True)
    ]
    return _pack(spec, drawn, device)


@dataclass(frozen=True, kw_only=True)
class FusedDrawing:
    """The element that the keys of all slots make, in two launches from buffers of its own."""

    spec: PermutationSpec
    keys: torch.Tensor
    packed: torch.Tensor
    recording: Recording

    def result(self) -> Permutation:
        """The element the keys make now."""
        self.recording.run()
        return Permutation(spec=self.spec, packed=self.packed.clone())


def fused_drawing(spec: PermutationSpec, device: torch.device, code: ModuleType) -> FusedDrawing:
    """The spec's drawing on `device`, made once."""
    cache: dict[torch.device, FusedDrawing] = spec.derived["drawing"]
    if device not in cache:
        packing = packing_of(spec, device)
        keys = torch.empty(packing.slots, dtype=torch.int64, device=device)
        packed = torch.empty_like(packing.offsets)
        issue = functools.partial(
            _issue_drawing, packing, keys, torch.empty_like(keys), packed, code
        )
        cache[device] = FusedDrawing(
            spec=spec, keys=keys, packed=packed, recording=Recording(issue, device)
        )
    return cache[device]


def _issue_drawing(
    packing: Packing,
    keys: torch.Tensor,
    drawn: torch.Tensor,
    packed: torch.Tensor,
    code: ModuleType,
) -> None:
    blocks = -(-packing.length // BLOCK)
    code.sort_groups[(packing.sorting.shape[0],)](keys, drawn, packing.sorting, BLOCK=BLOCK)
    code.compose_levels[(blocks,)](
        drawn,
        packing.stacked,
        packing.offsets,
        packed,
        packing.length,
        LEVELS=len(packing.levels),
        BLOCK=BLOCK,
    )


def from_groups(spec: PermutationSpec, permutations: Sequence[torch.Tensor]) -> Permutation:
    """Build an element from one permutation of `arange(size)` per group, in the spec's order."""
    if len(permutations) != len(spec.groups):
        raise InvalidArgumentError(
            "permutations", expected=f"{len(spec.groups)} of them", got=len(permutations)
        )
    for group, permutation in zip(spec.groups, permutations, strict=True):
        if sorted(permutation.tolist()) != list(range(group.size)):
            raise InvalidArgumentError(
                "permutations",
                expected=f"a permutation of {group.size} slots for {group.name}",
                got=tuple(permutation.shape),
            )
    if not permutations:
        return identity(spec)
    device = permutations[0].device
    by_size = packing_of(spec, device).by_size
    return _pack(
        spec,
        [permutations[g].to(torch.int64) for groups in by_size.values() for g in groups],
        device,
    )


def _pack(spec: PermutationSpec, drawn: list[torch.Tensor], device: torch.device) -> Permutation:
    """The element whose groups' permutations, in the order of the packing, are `drawn`."""
    packing = packing_of(spec, device)
    if not drawn:
        return identity(spec, device)
    slots = torch.cat(drawn)
    packed: torch.Tensor | None = None
    for level in packing.levels:
        source = torch.addcmul(level.base, level.step, slots.index_select(0, level.slot))
        packed = source if packed is None else packed.index_select(0, source)
    assert packed is not None
    return Permutation(spec=spec, packed=packed - packing.offsets)
