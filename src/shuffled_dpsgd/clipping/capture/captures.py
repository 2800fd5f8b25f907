"""What the backward of one call leaves behind, one type for each way a layer is captured.

A capture owns its tensors until the batch is settled. Replaying needs to know where they lie, and
moves the small ones, so every capture can name its tensors and exchange them.

`contributions.norm_sums.UnsummedNorm` is a capture too.

Shapes: B samples, S any parameter shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shuffled_dpsgd.clipping.contributions.cost import NormMethod


class Capture(Protocol):
    """Tensors of one call that norms and sums are computed from."""

    @property
    def kind(self) -> Hashable:
        """All that norms and sums depend on besides the slot and the tensors.

        A route is no part of it: it follows from the shapes of the tensors and where they are.
        """
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors, always in the same order."""
        ...

    def move(self, places: Mapping[int, Tensor]) -> None:
        """Hold `places[id(tensor)]` instead of a tensor, for each that is there."""
        ...


@dataclass(slots=True, eq=False)
class InputAndGradient:
    """A call's input and the gradient of its output: linear maps, convolutions and tables.

    A linear map whose weight is frozen does without the input. `route` is how the norm of the
    weight's gradient is found: by Gram matrices unless the cost rule has been asked and says else.
    """

    x: Tensor | None
    g: Tensor
    route: NormMethod = NormMethod.GRAM

    @property
    def kind(self) -> Hashable:
        return InputAndGradient

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.g,) if self.x is None else (self.x, self.g)

    def move(self, places: Mapping[int, Tensor]) -> None:
        self.x = places.get(id(self.x), self.x)
        self.g = places.get(id(self.g), self.g)


@dataclass(slots=True, eq=False)
class Projection:
    """Input and output gradient of the projection `part` of an attention layer.

    `route` as in `InputAndGradient`.
    """

    part: int
    x: Tensor
    g: Tensor
    route: NormMethod = NormMethod.GRAM

    @property
    def kind(self) -> Hashable:
        return Projection, self.part

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def move(self, places: Mapping[int, Tensor]) -> None:
        self.x = places.get(id(self.x), self.x)
        self.g = places.get(id(self.g), self.g)


@dataclass(slots=True, eq=False)
class StoredGradients:
    """Per-sample gradients of a weight and of a bias, where there is one or the other.

    `squares_B` are the squared norms of the weight's, if they are known.
    """

    weight_BS: Tensor | None
    bias_BS: Tensor | None
    squares_B: Tensor | None = None

    @property
    def kind(self) -> Hashable:
        return StoredGradients

    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.weight_BS, self.bias_BS, self.squares_B)
        return tuple([tensor for tensor in found if tensor is not None])

    def move(self, places: Mapping[int, Tensor]) -> None:
        self.weight_BS = places.get(id(self.weight_BS), self.weight_BS)
        self.bias_BS = places.get(id(self.bias_BS), self.bias_BS)
        self.squares_B = places.get(id(self.squares_B), self.squares_B)


@dataclass(slots=True, eq=False)
class StoredWeight:
    """Per-sample gradients of a weight, and the output gradient that its bias is summed from.

    `part` is the projection of an attention layer.
    """

    weight_BS: Tensor
    g: Tensor
    squares_B: Tensor | None = None
    part: int = 0

    @property
    def kind(self) -> Hashable:
        return StoredWeight, self.part

    def tensors(self) -> tuple[Tensor, ...]:
        if self.squares_B is None:
            return self.weight_BS, self.g
        return self.weight_BS, self.g, self.squares_B

    def move(self, places: Mapping[int, Tensor]) -> None:
        self.weight_BS = places.get(id(self.weight_BS), self.weight_BS)
        self.g = places.get(id(self.g), self.g)
        self.squares_B = places.get(id(self.squares_B), self.squares_B)


@dataclass(slots=True, eq=False)
class CopyGradients:
    """Gradients of the samples' copies of a slot's parameter number `part`."""

    part: int
    grads_BS: Tensor

    @property
    def kind(self) -> Hashable:
        return CopyGradients, self.part

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grads_BS,)

    def move(self, places: Mapping[int, Tensor]) -> None:
        self.grads_BS = places.get(id(self.grads_BS), self.grads_BS)
