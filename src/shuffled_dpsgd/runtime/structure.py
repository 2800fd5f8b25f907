"""The modules and parameters of a model, remembered by identity and compared with later.

Whoever prepared something for a model (slots, an inventory, a plan) must notice that the model is
no longer the one it was prepared for: what is new would be neither clipped, nor noised, nor moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from weakref import ref

from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError


@dataclass(frozen=True, kw_only=True)
class Change:
    """The first place where a model differs from what it was, as a path, and what happened."""

    name: str
    got: str


class Structure:
    """What a model holds now: the children and the parameters of every module, in order.

    If each module still has the children it had, the modules are the same. This is compared before
    every step, in C, because a walk over `named_parameters` takes ten times as long. The model
    itself is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        paths, modules = zip(*model.named_modules(), strict=True)
        self._model = ref(model)
        self._paths: Sequence[str] = paths
        self._below: Sequence[nn.Module] = modules[1:]
        self._held = _held(modules)
        self._names = _names(paths, modules)

    def fits(self, model: nn.Module) -> bool:
        """Whether it is the same model, with the modules and parameters it had."""
        return self._model() is model and same_objects(_held([model, *self._below]), self._held)

    def refuse_change(self) -> None:
        """Refuse a model whose modules or parameters are not those of before, naming the first."""
        change = self.find_change()
        if change is not None:
            raise UnsupportedModuleError(
                change.name,
                expected="the modules and parameters the engine was built on",
                got=change.got,
                remedy="build a new engine after changing the model; nobody would clip what is new",
            )

    def find_change(self) -> Change | None:
        """Where the model has changed, new parameters first; None if nowhere, or gone."""
        model = self._model()
        if model is None or self.fits(model):
            return None
        known = {id(one) for one in self._held}
        for name, parameter in model.named_parameters():
            if id(parameter) not in known:
                return Change(name=name, got="another parameter")
        modules = [model, *self._below]
        before = dict(zip(self._names, self._held, strict=True))
        now = dict(zip(_names(self._paths, modules), _held(modules), strict=True))
        differing = [name for name in before | now if before.get(name) is not now.get(name)]
        return Change(
            name=differing[0] if differing else "",
            got="another module, or none" if differing else "the same ones in another order",
        )


# Between two steps of training these objects leave the processor's caches. Touching them then costs
# more than comparing them. So the check visits each kind of object once, and in C.
_children = attrgetter("_modules")
_parameters = attrgetter("_parameters")


def _held(modules: Sequence[nn.Module]) -> list[object]:
    children = chain.from_iterable(map(dict.values, map(_children, modules)))
    parameters = chain.from_iterable(map(dict.values, map(_parameters, modules)))
    return [*children, *parameters]


def _names(paths: Iterable[str], modules: Iterable[nn.Module]) -> list[str]:
    """Where each of the objects `_held` lists is found, in the same order."""
    placed = [*zip(paths, modules, strict=True)]
    return [
        f"{path}.{key}" if path else key
        for kind in (_children, _parameters)
        for path, module in placed
        for key in kind(module)
    ]


def same_objects(found: Sequence[object], kept: Sequence[object]) -> bool:
    """Whether both list the very same objects in the same order."""
    return len(found) == len(kept) and all(map(is_, found, kept))
