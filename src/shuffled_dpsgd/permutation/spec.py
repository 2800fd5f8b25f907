"""What moves together: frozen groups of (parameter, axis, block), and nothing else.

A `Group` is one copy of the symmetric group S_n. Each of its members says where the n slots lie on
one axis of one parameter; permuting the slots in all members at once leaves the model's function
unchanged. Several groups may act on one axis (dimensions inside a head, then whole heads): they
act in the order in which the spec lists them, everywhere the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

Scope = Literal["paper", "full"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

Kind = Literal["mlp-hidden", "query-key", "value-output", "heads", "residual", "lora-rank"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Where the slots of a group lie on one axis.

    Slot j owns the positions `start + r * repeat_every + j * width + w` for r < repeats, w < width.

    >>> Block(start=4, width=2).positions(size=3)
    [[4, 5], [6, 7], [8, 9]]
    >>> Block(repeats=2, repeat_every=3).positions(size=3)
    [[0, 3], [1, 4], [2, 5]]
    """

    start: int = 0
    width: int = 1
    repeats: int = 1
    repeat_every: int = 0

    def positions(self, size: int) -> list[list[int]]:
        """The positions each of `size` slots owns, in an order that is the same for every slot."""
        return [
            [
                self.start + r * self.repeat_every + j * self.width + w
                for r in range(self.repeats)
                for w in range(self.width)
            ]
            for j in range(size)
        ]

    def end(self, size: int) -> int:
        """One past the last position owned."""
        return self.start + (self.repeats - 1) * self.repeat_every + size * self.width


@dataclass(frozen=True, kw_only=True)
class Member:
    """One axis of one parameter (named as in `named_parameters()`) that a group acts on."""

    parameter: str
    axis: int
    block: Block = Block()


@dataclass(frozen=True, kw_only=True)
class Group:
    """One symmetric group S_size acting on all its members at once."""

    name: str
    kind: Kind
    size: int
    members: tuple[Member, ...]

    @property
    def log10_order(self) -> float:
        """log10 of size!."""
        return math.lgamma(self.size + 1) / math.log(10)


@dataclass(frozen=True, kw_only=True)
class AxisLayout:
    """One index vector, shared by all `targets`; groups act on it in the order of `pieces`."""

    size: int
    pieces: tuple[tuple[int, Block], ...]
    targets: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class PermutationSpec:
    """The symmetries of one model: groups that move, and what does not move, with the reason.

    `shapes` maps every parameter, moved or not, to its shape; tied parameters appear once, under
    the name `named_parameters()` gives them.
    """

    scope: Scope
    groups: tuple[Group, ...]
    shapes: Mapping[str, tuple[int, ...]]
    unmoved: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @cached_property
    def moved_names(self) -> frozenset[str]:
        """Parameters with at least one axis that moves."""
        return frozenset(m.parameter for group in self.groups for m in group.members)

    @cached_property
    def total_parameters(self) -> int:
        """Number of scalar parameters, tied ones counted once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def moved_parameters(self) -> int:
        """Number of scalar parameters that live in tensors that move."""
        return sum(math.prod(self.shapes[name]) for name in self.moved_names)

    @property
    def shuffle_ratio(self) -> float:
        """Share of the parameters that live in tensors that move."""
        return self.moved_parameters / self.total_parameters if self.total_parameters else 0.0

    @cached_property
    def log10_group_order(self) -> float:
        """log10 of the number of distinct draws, the product of the groups' orders."""
        return math.fsum(group.log10_order for group in self.groups)

    @cached_property
    def layouts(self) -> tuple[AxisLayout, ...]:
        """The distinct index vectors a draw consists of."""
        pieces: dict[tuple[str, int], list[tuple[int, Block]]] = {}
        for index, group in enumerate(self.groups):
            for member in group.members:
                key = (member.parameter, member.axis)
                pieces.setdefault(key, []).append((index, member.block))
        targets: dict[tuple[int, tuple[tuple[int, Block], ...]], list[tuple[str, int]]] = {}
        for (name, axis), found in pieces.items():
            layout = (self.shapes[name][axis], tuple(found))
            targets.setdefault(layout, []).append((name, axis))
        return tuple(
            AxisLayout(size=size, pieces=acting, targets=tuple(where))
            for (size, acting), where in targets.items()
        )

    @cached_property
    def axes_of(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """For each moved parameter, its moving axes as (axis, index into `layouts`)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for index, layout in enumerate(self.layouts):
            for name, axis in layout.targets:
                found.setdefault(name, []).append((axis, index))
        return {name: tuple(sorted(axes)) for name, axes in found.items()}

    def within(self, names: Collection[str]) -> PermutationSpec:
        """The groups all of whose parameters are among these; each is a symmetry by itself."""
        kept = tuple(g for g in self.groups if all(m.parameter in names for m in g.members))
        moved = {member.parameter for group in kept for member in group.members}
        left = dict.fromkeys(self.moved_names - moved, "moves with weights that are not trained")
        return replace(self, groups=kept, unmoved={**self.unmoved, **left})

    @cached_property
    def derived(self) -> dict[str, dict[Any, Any]]:
        """Tables that drawing and applying compute from the spec once, by purpose and key."""
        return defaultdict(dict)

    def __getstate__(self) -> dict[str, Any]:
        """All but `derived`: a copy makes its own tables, on its own devices."""
        return {key: value for key, value in vars(self).items() if key != "derived"}

    def count_by_kind(self) -> dict[str, dict[str, float]]:
        """Per kind: number of groups, parameters in tensors it moves, log10 of its order.

        A tensor moved by two kinds counts in both, so the parameter counts do not add up.
        """
        table: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            of_kind = [group for group in self.groups if group.kind == kind]
            names = {member.parameter for group in of_kind for member in group.members}
            if not of_kind:
                continue
            table[kind] = {
                "groups": len(of_kind),
                "moved_parameters": sum(math.prod(self.shapes[name]) for name in names),
                "log10_group_order": math.fsum(group.log10_order for group in of_kind),
            }
        return table

    def to_json(self) -> dict[str, Any]:
        """Plain data for the command line and for reports."""
        return {
            "scope": self.scope,
            "total_parameters": self.total_parameters,
            "moved_parameters": self.moved_parameters,
            "shuffle_ratio": self.shuffle_ratio,
            "log10_group_order": self.log10_group_order,
            "kinds": self.count_by_kind(),
            "groups": [
                {
                    "name": group.name,
                    "kind": group.kind,
                    "size": group.size,
                    "members": [
                        {"parameter": m.parameter, "axis": m.axis, **vars(m.block)}
                        for m in group.members
                    ],
                }
                for group in self.groups
            ],
            "unmoved": dict(self.unmoved),
            "notes": list(self.notes),
        }
