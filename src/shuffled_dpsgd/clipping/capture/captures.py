"""What the backward of one call leaves behind, one type for each way a layer is captured.

A capture owns its tensors until the batch is settled.

Shapes: B samples, T positions, D the normalised width, S any parameter shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shuffled_dpsgd.clipping.contributions.cost import NormMethod


class Capture:
    """Tensors of one call that norms and sums are computed from."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class InputAndGradient(Capture):
    """A call's input and the gradient of its output: linear maps, convolutions and tables.

    A linear map whose weight is frozen does without the input. `route` is how the norm of the
    weight's gradient is found: by Gram matrices unless the cost rule has been asked and says else.
    """

    x: Tensor | None
    g: Tensor
    route: NormMethod = NormMethod.GRAM


@dataclass(slots=True, eq=False)
class Projection(Capture):
    """The same of projection `part` of an attention layer."""

    part: int
    x: Tensor
    g: Tensor
    route: NormMethod = NormMethod.GRAM


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


@dataclass(slots=True, eq=False)
class StoredWeight(Capture):
    """Per-sample gradients of a weight, and the output gradient that its bias is summed from."""

    weight_BS: Tensor
    g: Tensor
    squares_B: Tensor | None = None
    part: int = 0


@dataclass(slots=True, eq=False)
class CopyGradients(Capture):
    """Gradients of the samples' copies of a slot's parameter number `part`."""

    part: int
    grads_BS: Tensor
