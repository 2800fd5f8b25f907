"""Steps the user's optimizer with privatized gradients, and with nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.shards import any_sharded, spread_like


class GuardedOptimizer:
    """Steps the user's optimizer; direct calls of `optimizer.step()` are refused until `remove`.

    `shows_sums` says whether, in exact arithmetic, the sums of every update so far can be computed
    from the weights after it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trainable: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._optimizer = optimizer
        self._trainable = trainable
        self._updating = False
        # Plain SGD is linear in the sums, a subclass need not be. Small updates of low-precision
        # weights are rounded away.
        wide = all(torch.finfo(p.dtype).bits >= 32 for p in trainable.values())
        self.shows_sums = wide and type(optimizer) is torch.optim.SGD
        self._is_sharded = any_sharded(trainable.values())
        self._hook = optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """One step with these gradients, which are removed from the parameters afterwards.

        For a sharded parameter, the gradient is that of this rank's rows.
        """
        for name, parameter in self._trainable.items():
            gradient = gradients[name].to(parameter.dtype)
            parameter.grad = spread_like(gradient, parameter) if self._is_sharded else gradient
        groups = self._optimizer.param_groups
        self.shows_sums &= all(g["lr"] != 0 and g.get("dampening") != 1 for g in groups)
        self._updating = True
        try:
            self._optimizer.step()
        finally:
            self._updating = False
        for parameter in self._trainable.values():
            parameter.grad = None

    def remove(self) -> None:
        """Allow direct steps again."""
        self._hook.remove()

    def _refuse_foreign_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        if not self._updating:
            raise InvalidArgumentError(
                "optimizer.step",
                expected="private.step(), which privatizes the gradient first",
                got="a direct call",
                remedy="call private.close() when the private run is over",
            )
