"""An optimizer whose step has already happened.

The Trainer calls `optimizer.step()` after each turn of its loop. In private training the update is
part of `private.step()`; a second one would be un-privatized, and is refused by the run. This
stands in for the real optimizer towards the Trainer, its accelerator and the schedulers: same
parameter groups, same state, a `step()` that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SteppedOptimizer(torch.optim.Optimizer):
    """Shows the wrapped optimizer's groups and state; `step` and `zero_grad` do nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Deliberately without super().__init__(), which would make groups of its own.
        self._inner = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The real optimizer's groups, so that schedulers set its learning rate."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The real optimizer's state."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The real optimizer's defaults."""
        return self._inner.defaults

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the private step has updated the weights."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the private step leaves no gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The real optimizer's."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the real optimizer."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the real optimizer."""
        self._inner.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"SteppedOptimizer({self._inner!r})"
