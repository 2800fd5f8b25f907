"""Where the index vectors of a draw lie, and which groups fill them: worked out once per spec."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shuffled_dpsgd.permutation.spec import Block, PermutationSpec


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How the permutations of groups fill one packed vector, each layout's index after another.

    `by_size` lists the groups of each size. In that order their permutations lie one after another
    in a vector of `slots` entries, `drawn`. Groups that touch no common position act at once, on
    one level. There position p takes the value at `base[p] + step[p] * drawn[slot[p]]`, where
    `base`, `slot` and `step` are the rows of the level's table. `offsets` says where the index
    vector of each position starts.
    """

    slots: int
    by_size: dict[int, tuple[int, ...]]
    offsets: torch.Tensor
    tables: torch.Tensor

    def fill(self, drawn: torch.Tensor) -> torch.Tensor:
        """The packed index vectors that the groups' permutations make."""
        source = self.here
        for base, slot, step in self.tables:
            here = torch.addcmul(base, step, drawn.index_select(0, slot))
            source = source.index_select(0, here)
        return source - self.offsets

    @property
    def here(self) -> torch.Tensor:
        """Every position of the packed vector."""
        return torch.arange(len(self.offsets), device=self.offsets.device)


def packing_of(spec: PermutationSpec, device: torch.device) -> Packing:
    """The spec's packing on `device`, built once per spec and device."""
    cache: dict[torch.device, Packing] = spec.derived["packing"]
    if device not in cache:
        packing = _build(spec) if device.type == "cpu" else packing_of(spec, torch.device("cpu"))
        cache[device] = replace(
            packing, offsets=packing.offsets.to(device), tables=packing.tables.to(device)
        )
    return cache[device]


def _build(spec: PermutationSpec) -> Packing:
    by_size: dict[int, list[int]] = {}
    for index, group in enumerate(spec.groups):
        by_size.setdefault(group.size, []).append(index)
    first_slot: dict[int, int] = {}
    slots = 0
    for size, groups in by_size.items():
        for index in groups:
            first_slot[index] = slots
            slots += size
    sizes = torch.tensor([layout.size for layout in spec.layouts], dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    places = _places(spec, starts.tolist())
    levels = _levels(places, int(sizes.sum()))
    tables = torch.zeros(max(levels, default=-1) + 1, 3, int(sizes.sum()), dtype=torch.int64)
    tables[:, 0] = torch.arange(tables.shape[2])
    for index, level in enumerate(levels):
        slot = first_slot[index] + torch.arange(spec.groups[index].size)
        base, slot_of, step = tables[level]
        for where, width in places[index]:
            base[where] = where[:, :1, :].expand_as(where)
            slot_of[where] = slot[:, None].expand_as(where)
            step[where] = width
    return Packing(
        slots=slots,
        by_size={size: tuple(groups) for size, groups in by_size.items()},
        offsets=starts.repeat_interleave(sizes),
        tables=tables,
    )


def _places(spec: PermutationSpec, starts: list[int]) -> list[list[tuple[torch.Tensor, int]]]:
    """For each group, the packed positions that it moves, and the width of its slots there."""
    found: list[list[tuple[torch.Tensor, int]]] = [[] for _ in spec.groups]
    for start, layout in zip(starts, spec.layouts, strict=True):
        for index, block in layout.pieces:
            where = start + _positions(block, spec.groups[index].size)
            found[index].append((where, block.width))
    return found


def _positions(block: Block, size: int) -> torch.Tensor:
    """Positions owned, of shape repeats x slots x width."""
    repeats = block.repeat_every * torch.arange(block.repeats)
    slots = block.width * torch.arange(size)
    return block.start + repeats[:, None, None] + slots[:, None] + torch.arange(block.width)


def _levels(places: list[list[tuple[torch.Tensor, int]]], length: int) -> list[int]:
    """For each group, the first level after every earlier group that shares a position with it."""
    free = torch.zeros(length, dtype=torch.int64)
    levels: list[int] = []
    for found in places:
        level = max(int(free[where].max()) for where, _ in found)
        for where, _ in found:
            free[where] = level + 1
        levels.append(level)
    return levels
