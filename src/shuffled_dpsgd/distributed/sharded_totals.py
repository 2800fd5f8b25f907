"""What the referee asks of the processes that a model's rows are spread over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shuffled_dpsgd.core.clip import sum_dtype
from shuffled_dpsgd.runtime.shards import Sharding, held


class ShardedTotals:
    """A stock backward of all ranks together: FSDP itself reduces and scatters the gradients.

    `coin` says whether the step that begins is compared, the same on every rank.
    """

    def __init__(
        self,
        sharding: Sharding,
        parameters: Mapping[str, nn.Parameter],
        coin: Callable[[], bool],
    ) -> None:
        self._sharding = sharding
        self._parameters = parameters
        self.coin = coin

    @property
    def computed_in(self) -> frozenset[torch.dtype]:
        """The types that weights are gathered in."""
        return self._sharding.computed_in

    def rows(self, outputs: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
        """This rank's rows of the gradients, summed over all ranks; FSDP gives their mean."""
        torch.autograd.backward(outputs, grads)
        found = {}
        for name, parameter in self._parameters.items():
            own, kind = held(parameter), sum_dtype(parameter.dtype)
            grad = None if parameter.grad is None else held(parameter.grad)
            rows = torch.zeros_like(own) if grad is None else grad * self._sharding.ranks
            found[name] = rows.to(kind)
            parameter.grad = None
        return found

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self._sharding.is_any(flag)
