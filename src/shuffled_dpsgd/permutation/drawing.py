"""Draw a uniform element of a spec's group; compose and invert elements.

A `Permutation` holds one index vector per `AxisLayout`, packed into a single tensor. Every
operation is a handful of kernels whatever the number of groups, and none waits for the device.
Where the index vectors lie, and which groups fill them, is worked out once per spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from shuffled_dpsgd.core.streams import uniform_keys
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation.spec import PermutationSpec


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
        """The index vector along one axis of one parameter; one that does not move is refused."""
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
        offsets = _packing_of(self.spec, self.packed.device).offsets
        after = other.packed.to(self.packed.device) + offsets
        return Permutation(spec=self.spec, packed=self.packed[after])

    def inverse(self) -> Permutation:
        """The element that undoes this one bit for bit."""
        packing = _packing_of(self.spec, self.packed.device)
        undone = torch.empty_like(self.packed)
        undone[self.packed + packing.offsets] = packing.here - packing.offsets
        return Permutation(spec=self.spec, packed=undone)

    def to(self, device: torch.device | str) -> Permutation:
        """The same element with its indices on `device`."""
        packed = self.packed.to(device, non_blocking=True)
        return self if packed is self.packed else Permutation(spec=self.spec, packed=packed)


def identity(spec: PermutationSpec, device: torch.device | str = "cpu") -> Permutation:
    """The element that moves nothing."""
    packing = _packing_of(spec, torch.device(device))
    return Permutation(spec=spec, packed=packing.here - packing.offsets)


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
    packing = _packing_of(spec, device)
    if isinstance(source, torch.Generator):
        keys = torch.empty(packing.slots, dtype=torch.int64, device=device)
        keys.random_(generator=source)
    else:
        keys = torch.from_numpy(uniform_keys(source, packing.slots)).to(device, non_blocking=True)
    parts = keys.split([size * len(groups) for size, groups in packing.by_size.items()])
    drawn = [
        part.view(-1, size).argsort(dim=1).flatten()
        for part, size in zip(parts, packing.by_size, strict=True)
    ]
    return Permutation(spec=spec, packed=packing.fill(torch.cat([keys[:0], *drawn])))


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
    packing = _packing_of(spec, permutations[0].device)
    drawn = [permutations[g] for groups in packing.by_size.values() for g in groups]
    return Permutation(spec=spec, packed=packing.fill(torch.cat(drawn).to(torch.int64)))


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """How the permutations of groups fill one packed vector, each layout's index after another.

    `by_size` lists the groups of each size. In that order their permutations lie one after another
    in a vector of `slots` entries, `drawn`. Groups that touch no common position act at once, on
    one level. There position p takes the value at `base[p] + step[p] * drawn[slot[p]]`, where
    `base`, `slot` and `step` are the rows of the level's table. `offsets` says where the index
    vector of each position starts.
    """

    slots: int
    by_size: dict[int, list[int]]
    offsets: torch.Tensor
    tables: torch.Tensor

    def fill(self, drawn: torch.Tensor) -> torch.Tensor:
        """The packed index vectors that the groups' permutations make."""
        source = self.here
        for base, slot, step in self.tables:
            source = source[torch.addcmul(base, step, drawn[slot])]
        return source - self.offsets

    @property
    def here(self) -> torch.Tensor:
        """Every position of the packed vector."""
        return torch.arange(len(self.offsets), device=self.offsets.device)


def _packing_of(spec: PermutationSpec, device: torch.device) -> _Packing:
    """The spec's packing on `device`, built once per spec and device."""
    cache: dict[torch.device, _Packing] = spec.derived["packing"]
    if device not in cache:
        packing = _build(spec) if device.type == "cpu" else _packing_of(spec, torch.device("cpu"))
        cache[device] = replace(
            packing, offsets=packing.offsets.to(device), tables=packing.tables.to(device)
        )
    return cache[device]


def _build(spec: PermutationSpec) -> _Packing:
    by_size: dict[int, list[int]] = {}
    for index, group in enumerate(spec.groups):
        by_size.setdefault(group.size, []).append(index)
    slots_of: dict[int, torch.Tensor] = {}
    slots = 0
    for size, groups in by_size.items():
        for index in groups:
            slots_of[index] = torch.arange(slots, slots + size)
            slots += size
    sizes = torch.tensor([layout.size for layout in spec.layouts], dtype=torch.int64)
    starts, total = sizes.cumsum(0) - sizes, int(sizes.sum())
    tables: list[torch.Tensor] = []
    # For each position, the first level after the groups that have acted on it.
    free = torch.zeros(total, dtype=torch.int64)
    for index, places in enumerate(_places(spec, starts.tolist())):
        level = max(int(free[where].max()) for where, _ in places)
        if level == len(tables):
            tables.append(torch.zeros(3, total, dtype=torch.int64))
            tables[level][0] = torch.arange(total)
        base, slot, step = tables[level]
        for where, width in places:
            free[where] = level + 1
            base[where] = where[:1].expand_as(where)
            slot[where] = slots_of[index][:, None].expand_as(where)
            step[where] = width
    return _Packing(
        slots=slots,
        by_size=by_size,
        offsets=starts.repeat_interleave(sizes),
        tables=torch.stack(tables) if tables else torch.zeros(0, 3, total, dtype=torch.int64),
    )


def _places(spec: PermutationSpec, starts: list[int]) -> list[list[tuple[torch.Tensor, int]]]:
    """For each group, the packed positions of its slots, one row for each, and a slot's width."""
    found: list[list[tuple[torch.Tensor, int]]] = [[] for _ in spec.groups]
    for start, layout in zip(starts, spec.layouts, strict=True):
        for index, block in layout.pieces:
            where = start + torch.tensor(block.positions(spec.groups[index].size))
            found[index].append((where, block.width))
    return found
