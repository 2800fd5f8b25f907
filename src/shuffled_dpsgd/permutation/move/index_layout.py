"""Where the index vectors of a draw lie, and which groups fill them: worked out once per spec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shuffled_dpsgd.permutation.spec import AxisLayout, Block, PermutationSpec

# Slots, or positions, one program of the Triton kernels works on.
BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Level:
    """Groups that touch no common position, so that they act at once.

    Position p takes the value at `base[p] + step[p] * drawn[slot[p]]`, where `drawn` holds the
    groups' permutations one after another.
    """

    base: torch.Tensor
    slot: torch.Tensor
    step: torch.Tensor

    def to(self, device: torch.device) -> Level:
        return Level(
            base=self.base.to(device), slot=self.slot.to(device), step=self.step.to(device)
        )


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each layout's index vector lies in the packed tensor, and how groups fill it.

    `by_size` lists the groups of each size; in that order their permutations are held one after
    another when they fill the vectors. `sorting` and `stacked` are what the Triton kernels need to
    know of that order and of the levels.
    """

    starts: tuple[int, ...]
    length: int
    slots: int
    offsets: torch.Tensor
    levels: tuple[Level, ...]
    by_size: dict[int, tuple[int, ...]]
    sorting: torch.Tensor
    stacked: torch.Tensor

    def to(self, device: torch.device) -> Packing:
        return Packing(
            starts=self.starts,
            length=self.length,
            slots=self.slots,
            offsets=self.offsets.to(device),
            levels=tuple(level.to(device) for level in self.levels),
            by_size=self.by_size,
            sorting=self.sorting.to(device),
            stacked=self.stacked.to(device),
        )


def packing_of(spec: PermutationSpec, device: torch.device) -> Packing:
    """The spec's packing on `device`, built once per spec and device."""
    cache: dict[torch.device, Packing] = spec.derived["packing"]
    if device not in cache:
        on_cpu = cache.setdefault(torch.device("cpu"), _build_packing(spec))
        cache[device] = on_cpu if device.type == "cpu" else on_cpu.to(device)
    return cache[device]


def _build_packing(spec: PermutationSpec) -> Packing:
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
            sorting += [(slots, size, start) for start in range(0, size, BLOCK)]
            slots += size
    offsets = torch.zeros(length, dtype=torch.int64)
    for start, layout in zip(starts, spec.layouts, strict=True):
        offsets[start : start + layout.size] = start
    level_of = _levels(spec)
    tables: list[Level] = []
    for level in range(max(level_of, default=-1) + 1):
        table = Level(
            base=torch.arange(length),
            slot=torch.zeros(length, dtype=torch.int64),
            step=torch.zeros(length, dtype=torch.int64),
        )
        for start, layout in zip(starts, spec.layouts, strict=True):
            _fill(table, start, layout, spec, [lv == level for lv in level_of], first_slot)
        tables.append(table)
    return Packing(
        starts=tuple(starts),
        length=length,
        slots=slots,
        offsets=offsets,
        levels=tuple(tables),
        by_size={size: tuple(groups) for size, groups in by_size.items()},
        sorting=torch.tensor(sorting),
        stacked=torch.stack([part for t in tables for part in (t.base, t.slot, t.step)])
        if tables
        else offsets[:0],
    )


def _fill(
    table: Level,
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
