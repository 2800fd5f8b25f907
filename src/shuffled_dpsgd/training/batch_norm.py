"""`fix_model`: layers with batch statistics replaced by layers that see one sample at a time."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shuffled_dpsgd.errors import InvalidArgumentError

_MOST_GROUPS, _LEAST_CHANNELS = 32, 4


def fix_model(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm of `model` by a GroupNorm, in place, and say which.

    Scales and shifts stay the same parameters, so an optimizer of the model stays right. Running
    statistics are dropped: a pretrained model computes something else afterwards, and has to be
    trained again. There are at most 32 groups, of at least four channels, because a group of one
    number is always normalised to zero. A `BatchNorm1d` gets one group, because it may be given
    samples without further axes.

    Returns:
        The model, or what takes its place if it is itself a BatchNorm.
    """
    # Every path: a layer that is used in two places is replaced in both, by one and the same.
    modules = model.named_modules(remove_duplicate=False)
    found = {path: module for path, module in modules if isinstance(module, _BatchNorm)}
    made = {id(old): _group_norm(path, old) for path, old in found.items()}
    for path, old in found.items():
        parent, _, name = path.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), name, made[id(old)])
    if made:
        shown = ", ".join([path or "the model" for path in found][:4])
        warnings.warn(
            f"{len(made)} BatchNorm layers became GroupNorm, and their running statistics are "
            f"gone: {shown}{', ...' if len(found) > 4 else ''}",
            UserWarning,
            stacklevel=2,
        )
    return made.get(id(model), model)


def _group_norm(path: str, old: _BatchNorm) -> nn.GroupNorm:
    channels, flat = old.num_features, isinstance(old, nn.BatchNorm1d)
    if channels < 1 + flat:
        raise InvalidArgumentError(
            path or "model",
            expected="a BatchNorm of known channels, of two at least in one dimension",
            got=f"{type(old).__name__}({channels})",
            remedy="take it out, or run a lazy model once before",
        )
    most = 1 if flat else max(1, min(_MOST_GROUPS, channels // _LEAST_CHANNELS))
    groups = max(number for number in range(1, most + 1) if channels % number == 0)
    new = nn.GroupNorm(groups, channels, eps=old.eps, affine=False)
    new.affine, new.weight, new.bias = old.affine, old.weight, old.bias
    return new.train(old.training)
