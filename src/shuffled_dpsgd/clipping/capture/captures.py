"""What the backward of one call leaves behind, one type for each way a layer is captured.

A capture owns its tensors until the batch is finalized.

Shapes: B samples, T positions, D the normalised width, S any parameter shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shuffled_dpsgd.clipping.contributions.cost import NormMethod
from shuffled_dpsgd.clipping.contributions.kinds import Contribution, DenseGrad


class Capture:
    """Tensors of one call that norms and sums are computed from."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class InputAndGradient(Capture):
    """A call's input and the gradient of its output: linear maps, convolutions and tables.

    A linear map whose weight is frozen does without the input. `backend` is how the norm of the
    weight's gradient is found: by Gram matrices unless the cost rule has been asked and says else.
    `part` is the number of the map in a layer of several.
    """

    x: Tensor | None
    g: Tensor
    backend: NormMethod = NormMethod.GRAM
    part: int = 0


@dataclass(slots=True, eq=False)
class UnsummedNorm(Capture):
    """A layer norm whose per-sample sums are still to be made, with others in one launch."""

    x_BTD: Tensor
    g_BTD: Tensor
    eps: float


@dataclass(slots=True, eq=False)
class StoredGradients(Capture):
    """Per-sample gradients of weight and bias; the squared norms of the weight's, if known."""

    weight_BS: Tensor | None
    bias_BS: Tensor | None
    squares_B: Tensor | None = None
    part: int = 0

    def contributions(self, weight: str | None, bias: str | None) -> list[tuple[str, Contribution]]:
        """Those to parameters of these names, of which None is not trained."""
        found: list[tuple[str, Contribution]] = []
        if weight is not None and self.weight_BS is not None:
            found.append((weight, DenseGrad(grads_BS=self.weight_BS, squares_B=self.squares_B)))
        if bias is not None and self.bias_BS is not None:
            found.append((bias, DenseGrad(grads_BS=self.bias_BS)))
        return found


@dataclass(slots=True, eq=False)
class CopyGradients(Capture):
    """Gradients of the samples' copies of a slot's parameter number `part`."""

    part: int
    grads_BS: Tensor
