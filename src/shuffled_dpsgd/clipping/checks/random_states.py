"""Every generator that a model may draw from, put back so that a batch meets the same numbers.

Besides the shared generators of torch, NumPy and Python these are generators that modules hold, or
that stand beside a module's class. What a model draws from anywhere else cannot be repeated, and
such a model is refused because two runs of one batch differ.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shuffled_dpsgd.core.replay import Generators

Own = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_DROPOUTS = {"native_dropout", "_fused_dropout"}


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """The states of the shared generators, and of those that belong to one model."""

    shared: Generators
    own: tuple[tuple[Own, Any], ...]

    @classmethod
    def now(cls, model: nn.Module, device: torch.device) -> RandomStates:
        """The states as they are."""
        own = tuple((each, _state_of(each)) for each in _generators_of(model))
        return cls(shared=Generators.now(device), own=own)

    def restore(self) -> None:
        """Put all of them back."""
        self.shared.restore()
        for generator, state in self.own:
            _put_back(generator, state)

    def host_has_moved(self) -> bool:
        """Whether any generator has been used since, other than torch's shared ones."""
        now = Generators.now(self.shared.device)
        before = self.shared.python, self.shared.numpy
        if pickle.dumps(before) != pickle.dumps((now.python, now.numpy)):
            return True
        return any(
            pickle.dumps(_comparable(_state_of(each))) != pickle.dumps(_comparable(state))
            for each, state in self.own
        )


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
    torch.manual_seed(seed)
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
            is_mask = name == "bernoulli_" and args[0].numel() > self._size
            # Attention is tagged as random, with dropout or without.
            attends = "attention" in name
            self.any = True
            self.besides_dropout |= not (is_mask or attends or name in _DROPOUTS)
        return result


def _generators_of(model: nn.Module) -> list[Own]:
    found: dict[int, Own] = {}
    scopes: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        scopes[id(module)] = vars(module)
        beside = getattr(type(module).forward, "__globals__", {})
        scopes[id(beside)] = beside
    for scope in scopes.values():
        for value in list(scope.values()):
            if isinstance(value, Own):
                found[id(value)] = value
    return list(found.values())


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
