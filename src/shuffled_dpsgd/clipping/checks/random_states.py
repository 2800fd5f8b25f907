"""Every generator that a model may draw from, put back so that a batch meets the same numbers.

Besides the shared generators of torch, NumPy and Python these are generators that modules hold, or
that stand beside a module's class. What a model draws from anywhere else cannot be repeated, and
such a model is refused because two runs of one batch differ.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars, isfunction, ismethod
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shuffled_dpsgd.runtime.replay import Generators

Own = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_OPAQUE = (str, bytes, int, float, Tensor, np.ndarray, type(None))
_MOST_OBJECTS, _MOST_PARTS = 20_000, 64


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """The states of the shared generators, and of those that belong to one model."""

    shared: Generators
    own: tuple[tuple[Own, Any], ...]

    @classmethod
    def now(cls, model: nn.Module, device: torch.device) -> RandomStates:
        """The states as they are, with those of generators that modules of `model` hold."""
        return cls.with_own(_generators_of(model), device)

    @classmethod
    def with_own(cls, own: Iterable[Own], device: torch.device) -> RandomStates:
        """The states as they are, with those of some generators besides the shared ones."""
        states = tuple((each, _state_of(each)) for each in own)
        return cls(shared=Generators.now(device), own=states)

    def restore(self) -> None:
        """Put all of them back."""
        self.shared.restore()
        for generator, state in self.own:
            _put_back(generator, state)

    def host_has_moved(self) -> bool:
        """Whether any generator has been used since, other than torch's shared ones."""
        own = [each for each, _ in self.own]
        now = RandomStates.with_own(own, self.shared.device)
        return self._digest_of_host() != now._digest_of_host()

    def digest(self) -> bytes:
        """Bytes that differ once any generator has been used."""
        return pickle.dumps((self.shared.torch_cpu.tolist(), self._digest_of_host()))

    def _digest_of_host(self) -> bytes:
        own = [_comparable(state) for _, state in self.own]
        return pickle.dumps((self.shared.python, _listed(self.shared.numpy), own))


@contextmanager
def randomness_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, every generator stands afterwards where it stood before."""
    before = RandomStates.now(model, device)
    try:
        yield
    finally:
        before.restore()


def seed_all(seed: int) -> None:
    """Have the shared generators begin somewhere else; a model's own go on from where they are."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # The above notes a stack trace for every kind of device that is missing: 1 ms a call.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


class DrawsNoted(TorchDispatchMode):
    """Notes whether numbers are drawn for anything but dropout masks of `size` samples or more."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.any = False
        self.besides_dropout = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = str(func.overloadpacket.__name__)
            rate = _dropout_rate(func, args, kwargs or {})
            is_mask = name == "bernoulli_" and args[0].numel() > self._size
            self.any |= rate != 0.0
            self.besides_dropout |= rate is None and not is_mask
        return result


def _dropout_rate(func: Any, args: Any, kwargs: Any) -> float | None:
    """How much an operation drops, if it has dropout inside; attention is tagged as random even
    without."""
    if "bernoulli" in func.overloadpacket.__name__:
        return None
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            return float(kwargs.get(argument.name, args[place] if place < len(args) else 0.0))
    return None


def _generators_of(model: nn.Module) -> list[Own]:
    return generators_in([each for module in model.modules() for each in _scopes_of(module)], 1)


def _scopes_of(module: nn.Module) -> list[Any]:
    return [vars(module), getattr(type(module).forward, "__globals__", {})]


def generators_in(roots: Iterable[Any], depth: int) -> list[Own]:
    """Generators that objects hold, in attributes, closures, or beside their functions."""
    found: dict[int, Own] = {}
    seen: set[int] = set()
    waiting = [(root, depth) for root in roots]
    while waiting and len(seen) < _MOST_OBJECTS:
        value, left = waiting.pop()
        if isinstance(value, Own) and not isinstance(value, random.SystemRandom):
            found[id(value)] = value
        elif id(value) not in seen and left >= 0 and not isinstance(value, _OPAQUE):
            seen.add(id(value))
            waiting += [(part, left - 1) for part in _parts(value)]
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value[:_MOST_PARTS])
    function = getattr(value, "__func__", value)
    beside = getattr(function, "__globals__", {}) if isfunction(function) else {}
    globals_used = [each for each in beside.values() if isinstance(each, Own)]
    owner = [value.__self__] if ismethod(value) else []
    own = getattr(value, "__dict__", {})
    held = [] if isinstance(value, type | ModuleType) else list(own.values())
    closed = getclosurevars(function).nonlocals.values() if isfunction(function) else ()
    return [*held, *closed, *globals_used, *owner, *_partial(value)]


def _partial(value: Any) -> list[Any]:
    return [value.func, *value.args, value.keywords] if isinstance(value, partial) else []


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


def _comparable(state: Any) -> Any:
    return state.tolist() if isinstance(state, Tensor) else state


def _listed(state: Any) -> Any:
    """NumPy's state as plain numbers: the bytes of an array depend on how it came about."""
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]
