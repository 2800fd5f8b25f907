"""Notices gradients that reach a parameter past the engine.

A parameter used outside its own module, such as `F.linear(x, model.embedding.weight)`, receives an
ordinary gradient that no clipping has seen. That must never be added to anything silently.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError


class GradWatch:
    """Remembers every `.grad` at a moment, and finds those that have changed since."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.items())
        self._before: list[tuple[object, int]] = []

    def begin(self) -> None:
        """Take note of the gradients as they are."""
        self._before = [
            (None, 0) if p.grad is None else (p.grad, p.grad._version) for _, p in self._parameters
        ]

    def check(self) -> None:
        """Drop any gradient that has arrived since and refuse to go on.

        Raises:
            UnsupportedModuleError: naming the parameter.
        """
        for (name, parameter), (grad, version) in zip(self._parameters, self._before, strict=True):
            now = parameter.grad
            if now is not None and (now is not grad or now._version != version):
                for _, other in self._parameters:
                    other.grad = None
                raise UnsupportedModuleError(
                    name,
                    expected="a parameter used only by its own module",
                    got="an ordinary gradient from somewhere else",
                    remedy="make the forward inside `with engine:`, and call the module instead of "
                    "using its weight directly; or freeze it",
                )
