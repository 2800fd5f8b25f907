"""Which optimizers a shuffled run may use: those whose update commutes with a permutation.

An elementwise update does: weights, gradients and optimizer state can be permuted together. Under
any other update the shuffle would change the training, so it is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from shuffled_dpsgd.errors import InvalidArgumentError, require

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
_CLOSURE = "it evaluates the loss again inside its step, and every evaluation would need new noise"
_TWO_POINTS = (
    "it keeps the weights at two points, one for gradients and one to be released, and what is "
    "checked, shuffled and saved here would be the wrong one"
)
_REASONS: Mapping[str, str] = {
    "muon": "it orthogonalises whole matrices, so a coordinate's update depends on the others",
    "shampoo": "it preconditions with matrix roots, so a coordinate's update depends on the others",
    "soap": "it rotates into the eigenbasis of a preconditioner that a shuffle does not rotate",
    "kfac": "it preconditions with layer statistics that a shuffle does not move",
    "galore": "it projects gradients on a subspace that a shuffle does not rotate",
    "adafactor": "it keeps row and column averages, which are not shaped like the parameter",
    "adam_mini": "it shares one second moment among blocks that a shuffle takes apart",
    "8bit": "it quantises its state in blocks that a shuffle takes apart",
    "bitsandbytes": "its state may be quantised in blocks that a shuffle takes apart",
    "sparseadam": "it takes sparse gradients, and noise is dense",
}
_MASTER_WEIGHTS = (
    "load the model with dtype=torch.float32, or call model.float() before building the optimizer; "
    "for speed use bfloat16 autocast around the forward"
)
_REMEDY = "use SGD, Adam(W) or another elementwise optimizer, or shuffle='off'"


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, shuffled: bool, sharded: bool = False
) -> None:
    """Refuse an optimizer whose step needs a closure, or does not commute with permutations.

    Torch's elementwise optimizers are accepted by type, and others that are known are refused by
    name. Anything else is tested on a small tensor.
    """
    name = type(optimizer).__name__
    two_steps = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    if isinstance(optimizer, torch.optim.LBFGS) or two_steps:
        raise _refusal(name, _CLOSURE, remedy="use SGD or Adam(W)")
    if "schedulefree" in name.lower().replace("_", ""):
        raise _refusal(name, _TWO_POINTS, remedy="use Adam(W) or SGD with a schedule of its own")
    if sharded and "adafactor" in name.lower():
        raise _refusal(
            name,
            "its row and column averages are those of a shard, not of the parameter",
            remedy="use Adam(W) under fully_shard, or train unsharded",
        )
    if not shuffled or type(optimizer) in _ELEMENTWISE:
        return
    place = type(optimizer).__module__.partition(".")[0]
    for known, reason in _REASONS.items():
        if known == place or known in name.lower().replace("-", "_"):
            raise _refusal(f"{name} of {place}", reason, remedy=_REMEDY)
    if not _commutes(optimizer):
        reason = "its step does not commute with a permutation of coordinates"
        raise _refusal(name, reason, remedy=_REMEDY)


def check_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse unless the optimizer holds exactly the model's trainable parameters."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    require(names, "model", "at least one trainable parameter", "none")
    forgotten = sorted(names[key] for key in names.keys() - held)
    if forgotten:
        raise InvalidArgumentError(
            "optimizer",
            expected="every trainable parameter of the model",
            got=f"{len(forgotten)} missing, first {forgotten[0]}",
            remedy="add them, or freeze them with requires_grad_(False)",
        )
    if held - names.keys():
        raise InvalidArgumentError(
            "optimizer",
            expected="parameters of the model only",
            got=f"{len(held - names.keys())} others",
            remedy="build the optimizer from model.parameters(), after any wrapping of the model",
        )


def check_precision(model: torch.nn.Module) -> None:
    """Refuse to update float16 weights, and warn of bfloat16 ones; frozen ones may be either.

    In float16 the squares that Adam keeps vanish, and the first update is infinite. In bfloat16
    an update of less than a two-hundredth of a weight is rounded away.
    """
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    for name, dtype in trained.items():
        require(
            dtype != torch.float16, name, "trainable weights in float32", dtype, _MASTER_WEIGHTS
        )
    narrow = [name for name, dtype in trained.items() if dtype == torch.bfloat16]
    if narrow:
        warnings.warn(
            f"{len(narrow)} trainable parameters are bfloat16, first {narrow[0]}: most updates "
            f"will be rounded away; {_MASTER_WEIGHTS}",
            UserWarning,
            stacklevel=5,
        )


def _refusal(name: str, reason: str, *, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "optimizer", expected=f"an elementwise optimizer ({reason})", got=name, remedy=remedy
    )


def _commutes(optimizer: torch.optim.Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = (4, 6)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    order = torch.randperm(start.numel(), generator=generator)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[order].view(shape)

    plain = _trajectory(optimizer, start, gradients)
    permuted = _trajectory(optimizer, moved(start), [moved(g) for g in gradients])
    return torch.allclose(moved(plain), permuted, rtol=1e-9, atol=1e-12)


def _trajectory(
    like: torch.optim.Optimizer, start: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    try:
        probe = type(like)([parameter], **like.defaults)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            probe.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(type(like).__name__, f"trying it failed: {error}", remedy=_REMEDY) from error
    return parameter.detach()
