"""Every generator that a model or a loader may draw from, put back so that it draws the same again.

Besides the shared generators of torch, NumPy and Python these are generators that objects hold, or
that stand beside a module's class. What is drawn from anywhere else cannot be repeated.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import isfunction, ismethod
from types import CellType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Own = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_OPAQUE = (str, bytes, int, float, Tensor, np.ndarray, type(None))
_MOST_OBJECTS, _MOST_PARTS = 20_000, 64


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """The states of torch's, NumPy's and Python's generators, and of some that objects hold."""

    of_torch: tuple[Tensor, list[Tensor]]
    of_host: tuple[Any, Any]
    own: tuple[tuple[Own, Any], ...]

    @classmethod
    def now(cls, own: Iterable[Own] = ()) -> RandomStates:
        """The states as they are."""
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(
            of_torch=(torch.get_rng_state(), on_gpus),
            of_host=(np.random.get_state(), random.getstate()),  # noqa: NPY002
            own=tuple((each, _state_of(each)) for each in own),
        )

    @classmethod
    def of_model(cls, model: nn.Module) -> RandomStates:
        """The states as they are, with those of generators that modules of `model` hold."""
        scopes = [
            scope
            for module in model.modules()
            for scope in (vars(module), getattr(type(module).forward, "__globals__", {}))
        ]
        return cls.now(generators_in(scopes, 1))

    def again(self) -> RandomStates:
        """The states of the same generators as they are by now."""
        return RandomStates.now([each for each, _ in self.own])

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self.of_torch[0])
        for device, state in enumerate(self.of_torch[1]):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(self.of_host[0])  # noqa: NPY002
        random.setstate(self.of_host[1])
        for generator, state in self.own:
            _put_back(generator, state)

    def of_torch_alone(self) -> object:
        """Plain data that differ once torch's shared generators have been used."""
        return _plain(self.of_torch)

    def of_others(self) -> object:
        """Plain data that differ once any other generator has been used."""
        return _plain((self.of_host, [state for _, state in self.own]))

    def plain(self) -> object:
        """Plain data that differ once any generator has been used."""
        return self.of_torch_alone(), self.of_others()


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Whatever is drawn inside, the shared generators stand afterwards where they stood before."""
    before = RandomStates.now()
    try:
        yield
    finally:
        before.restore()


def seed_all(seed: int) -> None:
    """Have the shared generators begin somewhere else; what objects hold goes on as it was."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # The above notes a stack trace for every kind of device that is missing: 1 ms a call.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


class OperationsNoted(TorchDispatchMode):
    """Notes the types computed in, and draws besides dropout masks of more than `size` entries."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.dtypes: set[torch.dtype] = set()
        self.besides_dropout = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = str(func.overloadpacket.__name__)
            rates = {"dropout_p", "p", "dropout"} & {each.name for each in func._schema.arguments}
            is_dropout = bool(rates) and "bernoulli" not in name
            is_mask = name == "bernoulli_" and args[0].numel() > self._size
            self.besides_dropout |= not (is_dropout or is_mask)
        return result


def generators_in(roots: Iterable[Any], depth: int) -> list[Own]:
    """Generators that objects hold, in attributes, closures, or beside their functions."""
    found: dict[int, Own] = {}
    seen: set[int] = set()
    # Of functions: a module's names are looked through once, not for each of its functions.
    beside: dict[int, dict[str, Any]] = {}
    waiting = [(root, depth) for root in roots]
    while waiting and len(seen) < _MOST_OBJECTS:
        value, left = waiting.pop()
        if _is_own(value):
            found[id(value)] = value
        elif id(value) not in seen and left >= 0 and not isinstance(value, _OPAQUE):
            seen.add(id(value))
            waiting += [(part, left - 1) for part in _parts(value, beside)]
    everywhere = (each for names in beside.values() for each in names.values())
    found |= {id(e): e for e in everywhere if _is_own(e)}
    return list(found.values())


def _is_own(value: Any) -> TypeGuard[Own]:
    return _are_own(type(value))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _are_own(kind: type) -> bool:
    """Kept by class: of an object, torch answers in Python whether it is a generator."""
    return issubclass(kind, Own) and not issubclass(kind, random.SystemRandom)


def _parts(value: Any, beside: dict[int, dict[str, Any]]) -> list[Any]:
    """What an object holds; the names that stand beside a function are put into `beside`."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value[:_MOST_PARTS])
    if isinstance(value, partial):
        return [value.func, *value.args, value.keywords]
    function = getattr(value, "__func__", value)
    found = [value.__self__] if ismethod(value) else []
    if isfunction(function):
        beside[id(function.__globals__)] = function.__globals__
        # A cell is empty until its variable is bound.
        found += [c.cell_contents for c in function.__closure__ or () if c != CellType()]
    if not isinstance(value, type | ModuleType):
        found += getattr(value, "__dict__", {}).values()
    return found


def _state_of(generator: Own) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _put_back(generator: Own, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _plain(state: Any) -> Any:
    """A state without arrays, which do not compare as a whole."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return [(key, _plain(part)) for key, part in state.items()]
    if isinstance(state, list | tuple) and not all(type(part) is int for part in state):
        return [_plain(part) for part in state]
    return state
