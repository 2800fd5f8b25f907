"""Linear layers that `parallelize_module` has split over ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.rules.linear import LinearSlot, run_linear
from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import held


class SplitLinearSlot(LinearSlot):
    """A linear map of which every rank has some outputs (columnwise), or some inputs (rowwise).

    Torch's hooks around the module bring its input into place and its output together. In between
    a rank computes with ordinary tensors: what it captures gives its part of every sample's
    gradient. The bias of a rowwise layer is added once to the sum over ranks, by rank 0, which
    alone has its gradients.
    """

    kind = "split-linear"
    may_fold = False

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        weight = cast(Any, self.module._parameters["weight"])
        self._mesh = weight.device_mesh
        self._by_outputs = bool(weight.placements[0].is_shard(0))
        if not self._by_outputs and self._mesh.get_local_rank() > 0:
            self.bias_name = None
        self._hold()
        self.outputs = cast(Tensor, self.parameters["weight"]).shape[0]
        self.rows_of_zeros = 0

    def forward(self, input: Tensor) -> Tensor:
        # The first import takes long, and only such a model has made it already.
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        last = input.dim() - 1
        expected = Replicate() if self._by_outputs else Shard(last)
        if not isinstance(input, DTensor) or input.placements != (expected,):
            raise UnsupportedModuleError(
                self.path,
                expected=f"an input laid out as {expected} by parallelize_module",
                got=f"{getattr(input, 'placements', 'an ordinary tensor')}",
                remedy="split layers by ColwiseParallel() and RowwiseParallel()",
            )
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(input))
        self._hold()
        # Each rank knows what its own outputs ask of the input; the gradient is the sum of these.
        x = input.to_local(grad_placements=[Partial()] if self._by_outputs else None)
        out = run_linear(self, x)
        placement = Shard(last) if self._by_outputs else Partial()
        return cast(Tensor, DTensor.from_local(out, self._mesh, [placement], run_check=False))

    def _hold(self) -> None:
        """Compute with what this rank has of the parameters, as they are now."""
        own = {k: None if p is None else held(p) for k, p in self.module._parameters.items()}
        if not self._by_outputs and self._mesh.get_local_rank() > 0:
            own["bias"] = None
        self.parameters = cast(Any, own)
