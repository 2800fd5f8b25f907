"""Collects candidate groups while a model is described, and keeps those that are proven.

A candidate names every place where its features appear. Before it becomes a group, parameters that
several modules share are reconciled: candidates that meet in a shared parameter become one group,
and a candidate that moves a shared parameter without accounting for all its uses is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.permutation.describe import ports
from shuffled_dpsgd.permutation.describe.ports import Port
from shuffled_dpsgd.permutation.describe.shared_memory import entangled
from shuffled_dpsgd.permutation.spec import Block, Group, Kind, Member, PermutationSpec, Scope

_OUTSIDE_PAPER = "not moved by Theorems 1-2; scope='full' may move it"
_UNKNOWN = "belongs to no module known or traced to be invariant"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One use of a parameter, under the name of the module that uses it."""

    alias: str
    axis: int
    block: Block


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    name: str
    kind: Kind
    size: int
    sites: frozenset[Site]


def join(path: str, name: str) -> str:
    """Dotted path of `name` below `path`."""
    return f"{path}.{name}" if path and name else path or name


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
        self._canonical = {name: first[id(p)] for name, p in self.parameters.items()}
        self._entangled = entangled({name: self.parameters[name] for name in first.values()})
        self._described: set[str] = set()
        self._candidates: list[_Candidate] = []
        self._kept: dict[tuple[str, Kind | None], str] = {}
        self._reasons: dict[str, str] = {}
        self._notes: list[str] = []

    def inputs(self, path: str) -> list[Port]:
        """Axes that read the input of the module at `path`."""
        found = self.places(path)
        return [port for place in found for port in ports.inputs(place, self.modules[place])]

    def outputs(self, path: str) -> list[Port]:
        """Axes that write the output of the module at `path`."""
        found = self.places(path)
        return [port for place in found for port in ports.outputs(place, self.modules[place])]

    def places(self, path: str) -> list[str]:
        """The modules a path means: one, or every copy where a wrapper keeps several.

        peft keeps the original beside the trained copy of a module; both move, so that either
        may be active. Marks the parameters found as described.
        """
        places = [""]
        for part in path.split("."):
            places = [join(place, part) for place in places]
            places = [copy for place in places for copy in self._copies(place)]
        for place in places:
            prefix = f"{place}." if place else ""
            self._described |= {name for name in self.parameters if name.startswith(prefix)}
        return places

    def parameter(self, name: str, axis: int) -> Port:
        """An axis of a parameter that a known module uses directly."""
        if name not in self.parameters:
            raise UnsupportedModuleError(
                name,
                expected="a parameter",
                got="none of this name",
                remedy="what depends on it stays where it is",
            )
        self._described.add(name)
        return Port(parameter=name, axis=axis)

    def canonical(self, alias: str) -> str:
        """The name under which `named_parameters()` lists a parameter."""
        return self._canonical[alias]

    def aliases(self, canonical: str, path: str) -> list[str]:
        """All names of a parameter below `path`."""
        prefix = f"{path}." if path else ""
        return [
            alias
            for alias, name in self._canonical.items()
            if name == canonical and alias.startswith(prefix)
        ]

    def size(self, port: Port) -> int:
        """Length of the axis."""
        return int(self.parameters[port.parameter].shape[port.axis])

    def add(
        self, kind: Kind, name: str, size: int, places: Iterable[tuple[Sequence[Port], Block]]
    ) -> None:
        """Propose a group of `size` slots; each block is relative to the start of its ports."""
        sites = frozenset(
            Site(
                alias=port.parameter,
                axis=port.axis,
                block=Block(
                    start=port.start + block.start,
                    width=block.width,
                    repeats=block.repeats,
                    repeat_every=block.repeat_every if block.repeats > 1 else 0,
                ),
            )
            for found, block in places
            for port in found
        )
        if size > 1:
            self._candidates.append(_Candidate(name=name, kind=kind, size=size, sites=sites))

    def refuse(self, name: str, reason: str) -> None:
        """Say why a parameter, or every parameter below a module, stays where it is."""
        for alias in self.parameters:
            if not name or alias == name or alias.startswith(f"{name}."):
                self._reasons.setdefault(self._canonical[alias], reason)

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
        return [
            name
            for name in self.parameters
            if name.startswith(prefix) and name not in self._described
        ]

    def finish(self) -> PermutationSpec:
        """Drop what must stay, reconcile shared parameters and freeze what is left."""
        self._drop_kept()
        groups = [group for group in map(self._close, self._merge()) if group is not None]
        moved = {member.parameter for group in groups for member in group.members}
        shapes = {
            name: tuple(p.shape)
            for name, p in self.parameters.items()
            if self._canonical[name] == name
        }
        default = _OUTSIDE_PAPER if self.scope == "paper" else _UNKNOWN
        return PermutationSpec(
            scope=self.scope,
            groups=tuple(groups),
            shapes=shapes,
            unmoved={
                name: self._reasons.get(name, default) for name in shapes if name not in moved
            },
            notes=tuple(self._notes),
        )

    def _copies(self, path: str) -> list[str]:
        module: Any = self.modules.get(path)
        if module is None:
            raise UnsupportedModuleError(
                path,
                expected="a module of this name",
                got="none",
                remedy="what depends on it stays where it is",
            )
        if ports.class_name(module) not in ports.SAVED:
            return [path]
        saved = [join(path, f"modules_to_save.{name}") for name in module.modules_to_save]
        return [join(path, "original_module"), *saved]

    def _drop_kept(self) -> None:
        remaining = []
        for candidate in self._candidates:
            reason = next(
                (
                    reason
                    for (path, kind), reason in self._kept.items()
                    if kind in (None, candidate.kind)
                    and any(site.alias.startswith(f"{path}.") for site in candidate.sites)
                ),
                None,
            )
            if reason is None:
                remaining.append(candidate)
            else:
                self._drop(candidate, reason)
        self._candidates = remaining

    def _merge(self) -> list[_Candidate]:
        """Unite candidates that put the same slots on the same axis of one parameter."""
        merged: dict[int, _Candidate] = {}
        owner: dict[tuple[str, int, Block, int], int] = {}
        for index, candidate in enumerate(self._candidates):
            keys = [
                (self._canonical[s.alias], s.axis, s.block, candidate.size) for s in candidate.sites
            ]
            met = sorted({owner[key] for key in keys if key in owner})
            joined = candidate
            for other in met:
                joined = _unite(merged.pop(other), joined)
            home = met[0] if met else index
            merged[home] = joined
            for site in joined.sites:
                key = (self._canonical[site.alias], site.axis, site.block, joined.size)
                owner[key] = home
        return [merged[index] for index in sorted(merged)]

    def _close(self, candidate: _Candidate) -> Group | None:
        """Turn a candidate into a group, unless it misses a use of a shared parameter."""
        members = {(self._canonical[s.alias], s.axis, s.block) for s in candidate.sites}
        uses = {(s.alias, s.axis, s.block) for s in candidate.sites}
        for name, axis, block in members:
            if name in self._entangled:
                reason = f"{name} shares memory with {self._entangled[name]}; tie parameters by "
                self._drop(candidate, f"{reason}making them one object")
                return None
            if block.end(candidate.size) > self.parameters[name].shape[axis]:
                self._drop(candidate, f"{name} has fewer entries than the group has slots")
                return None
            for alias, canonical in self._canonical.items():
                if canonical == name and (alias, axis, block) not in uses:
                    self._drop(candidate, f"shared with {alias}, which this group cannot follow")
                    return None
        ordered = sorted(members, key=lambda m: (m[0], m[1], m[2].start))
        return Group(
            name=candidate.name,
            kind=candidate.kind,
            size=candidate.size,
            members=tuple(Member(parameter=n, axis=a, block=b) for n, a, b in ordered),
        )

    def _drop(self, candidate: _Candidate, reason: str) -> None:
        self.note(f"{candidate.name}: not permuted, {reason}")
        for site in candidate.sites:
            self._reasons.setdefault(self._canonical[site.alias], reason)


def _unite(earlier: _Candidate, later: _Candidate) -> _Candidate:
    kind = "residual" if "residual" in (earlier.kind, later.kind) else earlier.kind
    return _Candidate(
        name=earlier.name if kind == earlier.kind else later.name,
        kind=kind,
        size=earlier.size,
        sites=earlier.sites | later.sites,
    )
