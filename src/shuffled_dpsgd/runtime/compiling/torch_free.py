"""Imports modules of kernels without torch, for processes that only compile.

torch takes seconds to import, more than most kernels take to compile. Kernels need nothing of it;
only the functions that launch them do. So here packages of this project are empty but for their
modules, and everything in torch is a name without a meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PROJECT = "shuffled_dpsgd"


class _Name:
    """Something in torch: can be looked into, called, subscripted and derived from."""

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name()

    def __call__(self, *args: Any, **kwargs: Any) -> _Name:
        return _Name()

    def __getitem__(self, key: Any) -> _Name:
        return _Name()

    def __or__(self, other: Any) -> _Name:
        return _Name()

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Torch(ModuleType):
    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name()


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room = name.partition(".")[0]
        if room == "torch":
            return ModuleSpec(name, self, is_package=True)
        if room != PROJECT:
            return None
        found = PathFinder.find_spec(name, path)
        if found is None or found.submodule_search_locations is None:
            return found
        empty = ModuleSpec(name, self, is_package=True)
        empty.submodule_search_locations = found.submodule_search_locations
        return empty

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Torch(spec.name) if spec.name.partition(".")[0] == "torch" else None

    def exec_module(self, module: ModuleType) -> None:
        pass


def leave_torch_out() -> None:
    """Have all later imports of this process do without torch; for a process that computes nothing.

    Triton asks whether torch is at hand only to launch kernels.
    """
    assert "torch" not in sys.modules, "torch has been imported already"
    sys.meta_path.insert(0, _Finder())
