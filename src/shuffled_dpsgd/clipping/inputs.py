"""The batch size of a call of the model, read off its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.errors import InvalidArgumentError

# Inputs that carry the batch on axis 0 by convention, looked at before any other keyword.
PRIMARY_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")


def find_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, str]:
    """(batch size, device type) of a call: axis 0 of the primary input, else of the first tensor.

    A wrong guess is not silent: every layer checks its own input against the batch size.
    """
    for name in PRIMARY_INPUTS:
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            return value.shape[0], value.device.type
    tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor) and x.dim()]
    for tensor in tensors:
        # A leading axis of length one beside longer ones is broadcast, as position ids often are.
        if tensor.shape[0] != 1:
            return tensor.shape[0], tensor.device.type
    if tensors:
        return 1, tensors[0].device.type
    raise InvalidArgumentError(
        "inputs", expected="a tensor with the batch on axis 0", got="no tensor at all"
    )
