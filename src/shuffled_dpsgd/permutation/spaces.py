"""Feature spaces of a traced graph: axes that must be permuted alike, or not at all.

Constraints only accumulate: axes once found equal stay equal, and an axis once pinned stays
pinned, with everything that equals it. What is left unpinned at the end may move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["write", "read", "scale"]
Axis = tuple[str, int]


@dataclass(eq=False)
class Space:
    """A set of parameter axes that carry the same features, of `size` entries."""

    size: int
    axes: dict[Axis, Role] = field(default_factory=dict)
    pinned: str = ""
    parent: Space | None = None


class Spaces:
    """A union-find over spaces, keyed by the parameter axes they hold."""

    def __init__(self) -> None:
        self._of_axis: dict[Axis, Space] = {}
        self._all: list[Space] = []

    def new(self, size: int, *, pinned: str = "") -> Space:
        """A space of its own."""
        space = Space(size=size, pinned=pinned)
        self._all.append(space)
        return space

    def find(self, space: Space) -> Space:
        """The space it has become part of."""
        while space.parent is not None:
            space = space.parent
        return space

    def attach(self, space: Space, axis: Axis, role: Role) -> None:
        """Put a parameter's axis into a space; an axis seen before makes two spaces one."""
        space = self.find(space)
        if (seen := self._of_axis.get(axis)) is not None:
            space = self.unite(space, seen)
        else:
            self._of_axis[axis] = space
        space.axes.setdefault(axis, role)

    def unite(self, one: Space, other: Space) -> Space:
        """Make two spaces one; if their sizes differ, nothing is known and both are pinned."""
        one, other = self.find(one), self.find(other)
        if one is other:
            return one
        if one.size != other.size:
            self.pin(one, "combined with features of another size")
            self.pin(other, "combined with features of another size")
            return one
        other.parent = one
        one.axes.update(other.axes)
        one.pinned = one.pinned or other.pinned
        return one

    def pin(self, space: Space, reason: str) -> None:
        """Forbid the space to move; the first reason is kept."""
        space = self.find(space)
        space.pinned = space.pinned or reason

    def roots(self) -> list[Space]:
        """The distinct spaces, in the order of their first appearance."""
        return [space for space in self._all if space.parent is None]
