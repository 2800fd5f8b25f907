"""Collects candidate groups while a model is described, and keeps those that are proven.

A candidate names every place where its features appear, under the names of the modules that use
the parameters. Parameters that several modules share are reconciled at the end: candidates that
meet in a shared parameter become one group, and a candidate that moves a shared parameter without
accounting for all its uses is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation import layers
from shuffled_dpsgd.permutation.layers import Port, class_name, join
from shuffled_dpsgd.permutation.spec import Block, Group, Kind, Member, PermutationSpec, Scope

_OUTSIDE_PAPER = "not moved by Theorems 1-2; scope='full' may move it"
_UNKNOWN = "belongs to no module known or traced to be invariant"


class Sketch:
    """The description of one model in the making."""

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        self.scope: Scope = scope
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            if is_lazy(parameter):
                raise UnsupportedModuleError(
                    name,
                    expected="an initialised parameter",
                    got="a lazy one without a shape",
                    remedy="pass one batch through the model first",
                )
            first.setdefault(id(parameter), name)
        # Under every name of a parameter, the one that `named_parameters()` lists it by.
        self.canonical = {name: first[id(p)] for name, p in self.parameters.items()}
        self._entangled = _entangled({name: self.parameters[name] for name in first.values()})
        self._described: set[str] = set()
        self._candidates: list[Group] = []
        self._kept: dict[tuple[str, Kind | None], str] = {}
        self._reasons: dict[str, str] = {}
        self._notes: dict[str, None] = {}

    def inputs(self, path: str) -> list[Port]:
        """Axes that read the input of the module at `path`."""
        return [p for at in self.places(path) for p in layers.inputs(at, self.modules[at])]

    def outputs(self, path: str) -> list[Port]:
        """Axes that write the output of the module at `path`."""
        return [p for at in self.places(path) for p in layers.outputs(at, self.modules[at])]

    def places(self, path: str) -> list[str]:
        """The modules a path means: one, or every copy where a wrapper keeps several.

        peft keeps the original beside the trained copy of a module; both move, so that either
        may be active. Marks the parameters found as described.
        """
        places = [""]
        for part in path.split("."):
            places = [copy for place in places for copy in self._copies(join(place, part))]
        for place in places:
            self._described |= {name for name in self.parameters if is_below(name, place)}
        return places

    def parameter(self, name: str, axis: int, start: int = 0) -> Port:
        """An axis of a parameter that a known module uses directly."""
        if name not in self.parameters:
            raise _missing(name, "a parameter", "none of this name")
        self._described.add(name)
        return Port(parameter=name, axis=axis, start=start)

    def size(self, port: Port) -> int:
        """Length of the axis."""
        return int(self.parameters[port.parameter].shape[port.axis])

    def add(
        self, kind: Kind, name: str, size: int, places: Iterable[tuple[Sequence[Port], Block]]
    ) -> None:
        """Propose a group of `size` slots; each block is relative to the start of its ports."""
        members = [
            Member(
                parameter=port.parameter,
                axis=port.axis,
                block=replace(
                    block,
                    start=port.start + block.start,
                    repeat_every=block.repeat_every if block.repeats > 1 else 0,
                ),
            )
            for found, block in places
            for port in found
        ]
        if size > 1:
            self._candidates.append(Group(name=name, kind=kind, size=size, members=(*members,)))

    def refuse(self, name: str, reason: str) -> None:
        """Say why a parameter, or every parameter below a module, stays where it is."""
        for alias in self.parameters:
            if alias == name or is_below(alias, name):
                self._reasons.setdefault(self.canonical[alias], reason)

    def keep(self, path: str, reason: str, kind: Kind | None = None) -> None:
        """Let no group (of that kind only) move any parameter below the module at `path`."""
        self._kept.setdefault((path, kind), reason)

    def note(self, text: str) -> None:
        """Say something about the model as a whole, once."""
        self._notes[text] = None

    def undescribed(self, path: str) -> list[str]:
        """Parameters below `path` whose use no description accounts for."""
        return [n for n in self.parameters if is_below(n, path) and n not in self._described]

    def finish(self) -> PermutationSpec:
        """Drop what must stay, reconcile shared parameters and freeze what is left."""
        movable = [candidate for candidate in self._candidates if not self._must_stay(candidate)]
        groups = [group for group in map(self._close, self._merge(movable)) if group is not None]
        moved = {member.parameter for group in groups for member in group.members}
        shapes = {n: tuple(p.shape) for n, p in self.parameters.items() if self.canonical[n] == n}
        default = _OUTSIDE_PAPER if self.scope == "paper" else _UNKNOWN
        return PermutationSpec(
            scope=self.scope,
            groups=tuple(groups),
            shapes=shapes,
            unmoved={n: self._reasons.get(n, default) for n in shapes if n not in moved},
            notes=tuple(self._notes),
        )

    def _copies(self, path: str) -> list[str]:
        module: Any = self.modules.get(path)
        if module is None:
            raise _missing(path, "a module of this name", "none")
        if class_name(module) != layers.SAVED:
            return [path]
        saved = [join(path, f"modules_to_save.{name}") for name in module.modules_to_save]
        return [join(path, "original_module"), *saved]

    def _must_stay(self, candidate: Group) -> bool:
        for (path, kind), reason in self._kept.items():
            inside = any(is_below(member.parameter, path) for member in candidate.members)
            if inside and kind in (None, candidate.kind):
                self._drop(candidate, reason)
                return True
        return False

    def _merge(self, candidates: Sequence[Group]) -> list[Group]:
        """Unite candidates that put the same slots on the same axis of one parameter."""
        merged: dict[int, Group] = {}
        owner: dict[tuple[str, int, Block, int], int] = {}
        for index, candidate in enumerate(candidates):
            met = sorted({owner[key] for key in self._keys(candidate) if key in owner})
            joined = candidate
            for other in met:
                joined = _unite(merged.pop(other), joined)
            home = met[0] if met else index
            merged[home] = joined
            owner |= dict.fromkeys(self._keys(joined), home)
        return [merged[index] for index in sorted(merged)]

    def _keys(self, candidate: Group) -> list[tuple[str, int, Block, int]]:
        return [
            (self.canonical[m.parameter], m.axis, m.block, candidate.size)
            for m in candidate.members
        ]

    def _close(self, candidate: Group) -> Group | None:
        """Turn a candidate into a group, unless it misses a use of a shared parameter."""
        members = {replace(m, parameter=self.canonical[m.parameter]) for m in candidate.members}
        ordered = sorted(members, key=lambda m: (m.parameter, m.axis, m.block.start))
        for member in ordered:
            if reason := self._obstacle(candidate, member):
                self._drop(candidate, reason)
                return None
        return replace(candidate, members=tuple(ordered))

    def _obstacle(self, candidate: Group, member: Member) -> str:
        """Why the candidate cannot move one of its parameters, if it cannot."""
        name = member.parameter
        if name in self._entangled:
            other = self._entangled[name]
            return f"{name} shares memory with {other}; tie parameters by making them one object"
        if member.block.end(candidate.size) > self.parameters[name].shape[member.axis]:
            return f"{name} has fewer entries than the group has slots"
        known = {*candidate.members}
        for alias, canonical in self.canonical.items():
            if canonical == name and replace(member, parameter=alias) not in known:
                return f"shared with {alias}, which this group cannot follow"
        return ""

    def _drop(self, candidate: Group, reason: str) -> None:
        self.note(f"{candidate.name}: not permuted, {reason}")
        for member in candidate.members:
            self._reasons.setdefault(self.canonical[member.parameter], reason)


def is_below(name: str, path: str) -> bool:
    """Whether a dotted name lies below a path; everything lies below the empty one."""
    return not path or name.startswith(f"{path}.")


def _missing(name: str, expected: str, got: str) -> UnsupportedModuleError:
    remedy = "what depends on it stays where it is"
    return UnsupportedModuleError(name, expected=expected, got=got, remedy=remedy)


def _unite(earlier: Group, later: Group) -> Group:
    kind: Kind = "residual" if "residual" in (earlier.kind, later.kind) else earlier.kind
    name = earlier.name if kind == earlier.kind else later.name
    members = tuple(dict.fromkeys((*earlier.members, *later.members)))
    return replace(earlier, name=name, kind=kind, members=members)


def _entangled(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Names of parameters that share memory, each with the name of one it shares it with.

    Parameters tied as one object are known by several names and move once. Two objects over the
    same memory (`head.weight = nn.Parameter(table.weight.data)`) would move twice. A parameter some
    of whose own entries coincide cannot move at all: it is entangled with itself.
    """
    found: dict[str, str] = {}
    spans: list[tuple[int, int, int, str]] = []
    for name, parameter in parameters.items():
        # Other kinds (sharded, quantised) keep their memory elsewhere, and are refused when moved.
        plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided
        if not plain or not parameter.numel():
            continue
        axes = [*zip(parameter.shape, parameter.stride(), strict=True)]
        if any(stride == 0 and length > 1 for length, stride in axes):
            found[name] = name
        # First and one past the last element in the storage, counted in bytes.
        width, start = parameter.element_size(), int(parameter.storage_offset())
        last = start + sum((length - 1) * stride for length, stride in axes)
        storage = parameter.untyped_storage()._cdata
        spans.append((storage, start * width, (last + 1) * width, name))
    place, reached, holder = -1, -1, ""
    for storage, start, end, name in sorted(spans):
        if storage == place and start < reached:
            found.setdefault(name, holder)
            found.setdefault(holder, name)
        if storage != place or end > reached:
            place, reached, holder = storage, end, name
    return found
