"""Notices gradients that reach a parameter past the engine.

A parameter used outside its own module, such as `F.linear(x, model.embedding.weight)`, receives an
ordinary gradient that no clipping has seen. That must never be added to anything silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from operator import attrgetter, is_

from torch import Tensor, nn

from shuffled_dpsgd.errors import UnsupportedModuleError

_grad: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad")


class GradWatch:
    """Remembers every `.grad` at a moment, and finds those that have changed since."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = list(parameters)
        self._live = parameters
        # Those of a sharded model change places with their shards.
        self._fixed = list(parameters.values()) if isinstance(parameters, dict) else None
        self._before: list[tuple[object, int]] | None = None

    def begin(self) -> None:
        """Take note of the gradients as they are."""
        self._before = None
        if not self._all_none():
            grads = map(_grad, self._parameters)
            self._before = [(None, 0) if g is None else (g, g._version) for g in grads]

    def check(self) -> None:
        """Drop any gradient that has arrived since and refuse to go on.

        Raises:
            UnsupportedModuleError: naming the parameter.
        """
        if self._all_none():
            return
        before = self._before or [(None, 0)] * len(self._parameters)
        for name, now, (grad, version) in zip(
            self._names, map(_grad, self._parameters), before, strict=True
        ):
            if now is not None and (now is not grad or now._version != version):
                for parameter in self._parameters:
                    parameter.grad = None
                raise UnsupportedModuleError(
                    name,
                    expected="a parameter used only by its own module",
                    got="an ordinary gradient from somewhere else",
                    remedy="make the forward inside `with engine:`, and call the module instead of "
                    "using its weight directly; or freeze it",
                )

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self._live.values()) if self._fixed is None else self._fixed

    def _all_none(self) -> bool:
        """As it is in every step; found by C, because it is asked three times a step."""
        return all(map(is_, map(_grad, self._parameters), repeat(None)))
