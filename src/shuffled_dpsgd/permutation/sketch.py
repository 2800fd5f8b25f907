"""Collects candidate groups while a model is described, and keeps those that are proven.

A candidate names every place where its features appear. Before it becomes a group, parameters that
several modules share are reconciled: candidates that meet in a shared parameter become one group,
and a candidate that moves a shared parameter without accounting for all its uses is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation import layers
from shuffled_dpsgd.permutation.layers import Port, class_name, join
from shuffled_dpsgd.permutation.shared_memory import entangled
from shuffled_dpsgd.permutation.spec import Block, Group, Kind, Member, PermutationSpec, Scope

_OUTSIDE_PAPER = "not moved by Theorems 1-2; scope='full' may move it"
_UNKNOWN = "belongs to no module known or traced to be invariant"


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A group in the making; its members have the names of the modules that use the parameters."""

    name: str
    kind: Kind
    size: int
    members: frozenset[Member]


class Sketch:
    """The description of one model in the making."""

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        self.scope: Scope = scope
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self.parameters.items():
            if is_lazy(parameter):
                raise UnsupportedModuleError(
                    name,
                    expected="an initialised parameter",
                    got="a lazy one without a shape",
                    remedy="pass one batch through the model first",
                )
        first: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            first.setdefault(id(parameter), name)
        # Under every name of a parameter, the one that `named_parameters()` lists it by.
        self.canonical = {name: first[id(p)] for name, p in self.parameters.items()}
        self._entangled = entangled({name: self.parameters[name] for name in first.values()})
        self._described: set[str] = set()
        self._candidates: list[_Candidate] = []
        self._kept: dict[tuple[str, Kind | None], str] = {}
        self._reasons: dict[str, str] = {}
        self._notes: list[str] = []

    def inputs(self, path: str) -> list[Port]:
        """Axes that read the input of the module at `path`."""
        found = self.places(path)
        return [port for place in found for port in layers.inputs(place, self.modules[place])]

    def outputs(self, path: str) -> list[Port]:
        """Axes that write the output of the module at `path`."""
        found = self.places(path)
        return [port for place in found for port in layers.outputs(place, self.modules[place])]

    def places(self, path: str) -> list[str]:
        """The modules a path means: one, or every copy where a wrapper keeps several.

        peft keeps the original beside the trained copy of a module; both move, so that either
        may be active. Marks the parameters found as described.
        """
        places = [""]
        for part in path.split("."):
            places = [copy for place in places for copy in self._copies(join(place, part))]
        for place in places:
            prefix = f"{place}." if place else ""
            self._described |= {name for name in self.parameters if name.startswith(prefix)}
        return places

    def parameter(self, name: str, axis: int) -> Port:
        """An axis of a parameter that a known module uses directly."""
        if name not in self.parameters:
            raise _missing(name, "a parameter", "none of this name")
        self._described.add(name)
        return Port(parameter=name, axis=axis)

    def size(self, port: Port) -> int:
        """Length of the axis."""
        return int(self.parameters[port.parameter].shape[port.axis])

    def add(
        self, kind: Kind, name: str, size: int, places: Iterable[tuple[Sequence[Port], Block]]
    ) -> None:
        """Propose a group of `size` slots; each block is relative to the start of its ports."""
        members = frozenset(
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
        )
        if size > 1:
            self._candidates.append(_Candidate(name=name, kind=kind, size=size, members=members))

    def refuse(self, name: str, reason: str) -> None:
        """Say why a parameter, or every parameter below a module, stays where it is."""
        for alias in self.parameters:
            if not name or alias == name or alias.startswith(f"{name}."):
                self._reasons.setdefault(self.canonical[alias], reason)

    def keep(self, path: str, reason: str, kind: Kind | None = None) -> None:
        """Let no group (of that kind only) move any parameter below the module at `path`."""
        self._kept.setdefault((path, kind), reason)

    def note(self, text: str) -> None:
        """Say something about the model as a whole."""
        if text not in self._notes:
            self._notes.append(text)

    def undescribed(self, path: str) -> list[str]:
        """Parameters below `path` whose use no description accounts for."""
        prefix = f"{path}." if path else ""
        return [n for n in self.parameters if n.startswith(prefix) and n not in self._described]

    def finish(self) -> PermutationSpec:
        """Drop what must stay, reconcile shared parameters and freeze what is left."""
        self._drop_kept()
        groups = [group for group in map(self._close, self._merge()) if group is not None]
        moved = {member.parameter for group in groups for member in group.members}
        shapes = {
            name: tuple(p.shape)
            for name, p in self.parameters.items()
            if self.canonical[name] == name
        }
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

    def _drop_kept(self) -> None:
        remaining = []
        for candidate in self._candidates:
            reasons = (
                reason
                for (path, kind), reason in self._kept.items()
                if kind in (None, candidate.kind)
                and any(member.parameter.startswith(f"{path}.") for member in candidate.members)
            )
            if (reason := next(reasons, None)) is None:
                remaining.append(candidate)
            else:
                self._drop(candidate, reason)
        self._candidates = remaining

    def _merge(self) -> list[_Candidate]:
        """Unite candidates that put the same slots on the same axis of one parameter."""
        merged: dict[int, _Candidate] = {}
        owner: dict[tuple[str, int, Block, int], int] = {}
        for index, candidate in enumerate(self._candidates):
            met = sorted({owner[key] for key in self._keys(candidate) if key in owner})
            joined = candidate
            for other in met:
                joined = _unite(merged.pop(other), joined)
            home = met[0] if met else index
            merged[home] = joined
            owner |= dict.fromkeys(self._keys(joined), home)
        return [merged[index] for index in sorted(merged)]

    def _keys(self, candidate: _Candidate) -> list[tuple[str, int, Block, int]]:
        return [
            (self.canonical[m.parameter], m.axis, m.block, candidate.size)
            for m in candidate.members
        ]

    def _close(self, candidate: _Candidate) -> Group | None:
        """Turn a candidate into a group, unless it misses a use of a shared parameter."""
        members = {replace(m, parameter=self.canonical[m.parameter]) for m in candidate.members}
        ordered = sorted(members, key=lambda m: (m.parameter, m.axis, m.block.start))
        for member in ordered:
            name = member.parameter
            reason = ""
            if name in self._entangled:
                reason = f"{name} shares memory with {self._entangled[name]}; tie parameters by "
                reason += "making them one object"
            elif member.block.end(candidate.size) > self.parameters[name].shape[member.axis]:
                reason = f"{name} has fewer entries than the group has slots"
            else:
                uses = (alias for alias, known in self.canonical.items() if known == name)
                forgotten = (
                    a for a in uses if replace(member, parameter=a) not in candidate.members
                )
                if (alias := next(forgotten, None)) is not None:
                    reason = f"shared with {alias}, which this group cannot follow"
            if reason:
                self._drop(candidate, reason)
                return None
        return Group(
            name=candidate.name,
            kind=candidate.kind,
            size=candidate.size,
            members=tuple(ordered),
        )

    def _drop(self, candidate: _Candidate, reason: str) -> None:
        self.note(f"{candidate.name}: not permuted, {reason}")
        for member in candidate.members:
            self._reasons.setdefault(self.canonical[member.parameter], reason)


def _missing(name: str, expected: str, got: str) -> UnsupportedModuleError:
    remedy = "what depends on it stays where it is"
    return UnsupportedModuleError(name, expected=expected, got=got, remedy=remedy)


def _unite(earlier: _Candidate, later: _Candidate) -> _Candidate:
    kind = "residual" if "residual" in (earlier.kind, later.kind) else earlier.kind
    name = earlier.name if kind == earlier.kind else later.name
    members = earlier.members | later.members
    return replace(earlier, name=name, kind=kind, members=members)
