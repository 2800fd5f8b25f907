"""Which input of a call of the model tells the batch size."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.errors import InvalidArgumentError

# Inputs that carry the batch on axis 0 by convention, looked at before any other keyword.
PRIMARY_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")


def find_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a call that has the batch on axis 0: the primary one, else the first tensor.

    A wrong guess is not silent: every layer checks its own input against the batch size. Passing
    over a leading length of one would be wrong, though: that is what a batch of one looks like.
    """
    for name in PRIMARY_INPUTS:
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            return value
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf
    raise InvalidArgumentError(
        "inputs",
        expected="a tensor with the batch on axis 0",
        got="no tensor at all",
        remedy="pass tensors, or lists, tuples and dictionaries of them",
    )


def shapes_beside_batch(args: Any, kwargs: Mapping[str, Any], size: int) -> Hashable:
    """The shapes of all tensors of a call, the same for batches of other sizes.

    >>> import torch
    >>> shapes_beside_batch((torch.zeros(3, 5), "sum"), {"mask": torch.zeros(1, 5)}, 3)
    ((-1, 5), (1, 5))
    """
    shapes = [leaf.shape for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    return tuple([(-1, *shape[1:]) if shape[:1] == (size,) else tuple(shape) for shape in shapes])


def first_tensor(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor that a module is given, if any."""
    if args and isinstance(args[0], Tensor):
        return args[0]  # Most often; looking through all of them takes longer.
    return next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
