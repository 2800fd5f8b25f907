"""What tells batches apart that may take other paths through a model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

# The label that loss functions ignore.
NO_LABEL = -100


def are_ragged(args: Any, kwargs: Mapping[str, Any], size: int) -> tuple[bool, ...]:
    """For every whole-numbered input of samples: whether some are padded more than others.

    Padding shows as a longer run of one value at either end.

    >>> are_ragged((torch.tensor([[1, 1, 0], [1, 0, 0]]),), {}, 2)
    (True,)
    """
    leaves, _ = tree_flatten((args, dict(kwargs)))
    found = []
    for leaf in leaves:
        is_whole = isinstance(leaf, Tensor) and not leaf.is_floating_point()
        if is_whole and leaf.dim() == 2 and leaf.shape[0] == size and leaf.shape[1] > 0:
            ends = [_run_lengths(leaf), _run_lengths(leaf.flip(1))]
            found.append(any(bool((run != run[:1]).any()) and int(run.max()) > 1 for run in ends))
    return tuple(found)


def are_uneven(args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int) -> bool:
    """Whether samples have different numbers of labels, which a mean over tokens would weigh.

    By convention -100 is no label. A language model leaves out the first one of every sample.

    >>> are_uneven((torch.tensor([[1, 2, 3], [4, 5, -100]]),), {}, 2)
    True
    """
    for leaf in tree_leaves((args, dict(kwargs))):
        is_whole = isinstance(leaf, Tensor) and not leaf.is_floating_point()
        if is_whole and leaf.dim() > 1 and leaf.shape[0] == size:
            for some in (leaf, leaf[:, 1:]):
                labels_B = (some != NO_LABEL).flatten(1).sum(1)
                if bool((labels_B != labels_B[:1]).any()):
                    return True
    return False


def _run_lengths(ids_BT: Tensor) -> Tensor:
    """How many entries at the beginning of each row are the same."""
    return (ids_BT == ids_BT[:, :1]).cumprod(1).sum(1)


def kind_of_call(args: Any, kwargs: Mapping[str, Any], size: int) -> tuple[Any, ...]:
    """What distinguishes calls that may take other paths through a model.

    Types and numbers of axes, lengths up to a factor of four, and coincidences: a single sample,
    a single token, as many tokens as samples.

    >>> kind_of_call((torch.zeros(3, 9),), {}, 3) == kind_of_call((torch.zeros(5, 12),), {}, 5)
    True
    >>> kind_of_call((torch.zeros(3, 9),), {}, 3) == kind_of_call((torch.zeros(9, 9),), {}, 9)
    False
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    found: list[Any] = [spec, min(size, 2)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            lengths = [_length_class(length, size) for length in leaf.shape]
            found.append((leaf.dtype, *lengths))
    return tuple(found)


class BatchKinds:
    """Tells apart the batches that may take other paths through a model.

    Besides the inputs, what counts is which modules are in training mode and whether the forward
    is cast to half precision; and with `labels_count`, whether samples have different numbers of
    labels, because a mean over tokens cannot be told from one over samples until they do.
    """

    def __init__(self, model: nn.Module, *, labels_count: bool = True) -> None:
        self._labels_count = labels_count
        self._modules = list(model.modules())

    def of(self, args: Any, kwargs: Mapping[str, Any], size: int, device: str) -> Hashable:
        """The kind of a call with a batch of `size`."""
        modes = tuple([module.training for module in self._modules])
        uneven = self._labels_count and are_uneven(args, kwargs, size)
        return kind_of_call(args, kwargs, size), uneven, modes, torch.is_autocast_enabled(device)


def _length_class(length: int, size: int) -> str:
    if length == size:
        return "batch"
    return str(length) if length < 2 else f"about 4**{(length.bit_length() - 1) // 2}"
