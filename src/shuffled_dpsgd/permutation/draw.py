"""Draw a uniform element of a spec's group; compose and invert elements.

A `Permutation` holds one index vector per `AxisLayout`, packed into a single tensor. Every
operation is a handful of kernels whatever the number of groups, and none waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation.backend import triton_kernels
from shuffled_dpsgd.permutation.spec import AxisLayout, Block, PermutationSpec

# Slots, or positions, one program of the Triton kernels works on.
_BLOCK = 64
# The kernel compares every two keys of a group: for larger groups sorting is quicker.
_LARGEST_COMPARED = 8192


@dataclass(frozen=True, kw_only=True)
class _Level:
    """Groups that touch no common position, so that they act at once.

    Position p takes the value at `base[p] + step[p] * drawn[slot[p]]`, where `drawn` holds the
    groups' permutations one after another.
    """

    base: torch.Tensor
    slot: torch.Tensor
    step: torch.Tensor

    def to(self, device: torch.device) -> _Level:
        return _Level(
            base=self.base.to(device), slot=self.slot.to(device), step=self.step.to(device)
        )


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """Where each layout's index vector lies in the packed tensor, and how groups fill it.

    `by_size` lists the groups of each size; in that order their permutations are held one after
    another when they fill the vectors. `sorting` and `stacked` are what the Triton kernels need to
    know of that order and of the levels.
    """

    starts: tuple[int, ...]
    length: int
    offsets: torch.Tensor
    levels: tuple[_Level, ...]
    by_size: dict[int, tuple[int, ...]]
    sorting: torch.Tensor
    stacked: torch.Tensor

    def to(self, device: torch.device) -> _Packing:
        return _Packing(
            starts=self.starts,
            length=self.length,
            offsets=self.offsets.to(device),
            levels=tuple(level.to(device) for level in self.levels),
            by_size=self.by_size,
            sorting=self.sorting.to(device),
            stacked=self.stacked.to(device),
        )


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


def draw(spec: PermutationSpec, generator: torch.Generator) -> Permutation:
    """Draw uniformly from the spec's group, on the generator's device.

    Each group's permutation sorts independent 63-bit keys; two equal keys, the only departure
    from uniformity, have probability below size² / 2⁶⁴ in a group.
    """
    packing = packing_of(spec, generator.device)
    slots = sum(group.size for group in spec.groups)
    keys = torch.empty(slots, dtype=torch.int64, device=generator.device)
    keys.random_(generator=generator)
    code = triton_kernels()
    compared = 0 < max(packing.by_size, default=0) <= _LARGEST_COMPARED
    if generator.device.type == "cuda" and code is not None and compared:
        return draw_fused(spec, keys, code)
    parts = keys.split([size * len(groups) for size, groups in packing.by_size.items()])
    drawn = [
        part.view(-1, size).argsort(dim=1).flatten()
        for part, size in zip(parts, packing.by_size, strict=True)
    ]
    return _pack(spec, drawn, generator.device)


def draw_fused(spec: PermutationSpec, keys: torch.Tensor, code: ModuleType) -> Permutation:
    """The element the keys of all slots make, in two launches."""
    packing = packing_of(spec, keys.device)
    drawn = torch.empty_like(keys)
    packed = torch.empty_like(packing.offsets)
    blocks = -(-packing.length // _BLOCK)
    with torch.cuda.device_of(keys):
        code.sort_groups[(packing.sorting.shape[0],)](keys, drawn, packing.sorting, BLOCK=_BLOCK)
        code.compose_levels[(blocks,)](
            drawn,
            packing.stacked,
            packing.offsets,
            packed,
            packing.length,
            LEVELS=len(packing.levels),
            BLOCK=_BLOCK,
        )
    return Permutation(spec=spec, packed=packed)


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


def packing_of(spec: PermutationSpec, device: torch.device) -> _Packing:
    """The spec's packing on `device`, built once per spec and device."""
    cache: dict[torch.device, _Packing] = spec.derived["packing"]
    if device not in cache:
        on_cpu = cache.setdefault(torch.device("cpu"), _build_packing(spec))
        cache[device] = on_cpu if device.type == "cpu" else on_cpu.to(device)
    return cache[device]


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


def _build_packing(spec: PermutationSpec) -> _Packing:
    starts: list[int] = []
    length = 0
    for layout in spec.layouts:
        starts.append(length)
        length += layout.size
    by_size: dict[int, list[int]] = {}
    for index, group in enumerate(spec.groups):
        by_size.setdefault(group.size, []).append(index)
    first_slot = [0] * len(spec.groups)
    sorting: list[tuple[int, int, int]] = []
    slots = 0
    for size, groups in by_size.items():
        for index in groups:
            first_slot[index] = slots
            sorting += [(slots, size, start) for start in range(0, size, _BLOCK)]
            slots += size
    offsets = torch.zeros(length, dtype=torch.int64)
    for start, layout in zip(starts, spec.layouts, strict=True):
        offsets[start : start + layout.size] = start
    level_of = _levels(spec)
    tables: list[_Level] = []
    for level in range(max(level_of, default=-1) + 1):
        table = _Level(
            base=torch.arange(length),
            slot=torch.zeros(length, dtype=torch.int64),
            step=torch.zeros(length, dtype=torch.int64),
        )
        for start, layout in zip(starts, spec.layouts, strict=True):
            _fill(table, start, layout, spec, [lv == level for lv in level_of], first_slot)
        tables.append(table)
    return _Packing(
        starts=tuple(starts),
        length=length,
        offsets=offsets,
        levels=tuple(tables),
        by_size={size: tuple(groups) for size, groups in by_size.items()},
        sorting=torch.tensor(sorting),
        stacked=torch.stack([part for t in tables for part in (t.base, t.slot, t.step)])
        if tables
        else offsets[:0],
    )


def _fill(
    table: _Level,
    start: int,
    layout: AxisLayout,
    spec: PermutationSpec,
    chosen: list[bool],
    first_slot: list[int],
) -> None:
    for index, block in layout.pieces:
        if not chosen[index]:
            continue
        size = spec.groups[index].size
        where = start + _positions(block, size)
        slots = first_slot[index] + torch.arange(size)
        table.base[where] = where[:, :1, :].expand_as(where)
        table.slot[where] = slots[:, None].expand_as(where)
        table.step[where] = block.width


def _positions(block: Block, size: int) -> torch.Tensor:
    """Positions owned, of shape repeats x slots x width."""
    repeats = block.repeat_every * torch.arange(block.repeats)
    slots = block.width * torch.arange(size)
    return block.start + repeats[:, None, None] + slots[:, None] + torch.arange(block.width)


def _levels(spec: PermutationSpec) -> list[int]:
    """For each group, the first level after every earlier group that shares a position with it."""
    sites: list[list[tuple[int, Block]]] = [[] for _ in spec.groups]
    for layout_index, layout in enumerate(spec.layouts):
        for group_index, block in layout.pieces:
            sites[group_index].append((layout_index, block))
    free = [torch.zeros(layout.size, dtype=torch.int64) for layout in spec.layouts]
    levels: list[int] = []
    for group, where in zip(spec.groups, sites, strict=True):
        touched = [(free[layout], _positions(block, group.size)) for layout, block in where]
        level = max(int(depth[positions].max()) for depth, positions in touched)
        for depth, positions in touched:
            depth[positions] = level + 1
        levels.append(level)
    return levels
