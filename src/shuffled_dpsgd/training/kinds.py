"""Models, adapters and optimizers that cannot be trained privately, known by their kind."""

from __future__ import annotations

from typing import Any

import torch

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError, require

# PEFT's kinds of adapters that have no gradient per sample, with the reason.
_UNSUPPORTED = {
    "VBLORA": "it picks vectors of a shared bank by a top-k that vmap cannot run",
    "ADAPTION_PROMPT": "its attention repeats a prompt over the batch by the size of the batch",
    "PROMPT_TUNING": "its prompt is repeated over the batch before it is joined to the inputs",
    "MULTITASK_PROMPT_TUNING": "its prompt is repeated over the batch before it is joined",
    "P_TUNING": "its prompt is repeated over the batch before it is joined to the inputs",
    "UNILORA": "it takes its weights from a shared vector in a way that vmap cannot run",
    "POLY": "it has not been tried",
    "XLORA": "it has not been tried",
    "CARTRIDGE": "it has not been tried",
}


def check_kinds(model: Any, optimizer: Any) -> None:
    """Refuse what is neither a model nor an optimizer, and an optimizer wrapped by accelerate."""
    require(isinstance(model, torch.nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        raise InvalidArgumentError(
            "optimizer",
            expected="the optimizer itself",
            got="AcceleratedOptimizer",
            remedy="leave model, optimizer and data out of accelerator.prepare, or pass "
            "optimizer.optimizer: private.step() does what its step would",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            "optimizer",
            expected="a torch.optim.Optimizer",
            got=type(optimizer).__name__,
            remedy="the model comes first, then the optimizer",
        )


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside `torch.compile`'s wrapper: the same parameters under their own names."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def refuse_wrappers(model: torch.nn.Module) -> None:
    """Refuse data-parallel wrappers, which average gradients before they can be clipped."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, parallel) or name == "FullyShardedDataParallel":
            raise UnsupportedModuleError(
                path,
                expected="the model itself on every rank",
                got=name,
                remedy="pass the wrapped model, usually .module: under torchrun this library "
                "divides the batch and reduces clipped sums itself, once a step",
            )


def check_adapters(model: torch.nn.Module) -> None:
    """Refuse kinds of adapters that have no gradient per sample, before anything runs."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        reason = _UNSUPPORTED.get(kind)
        if getattr(config, "target_parameters", None):
            reason = "target_parameters adds its product to a weight before any sample comes in"
        if reason is not None:
            raise InvalidArgumentError(
                "model",
                expected=f"adapters that can be clipped per sample ({reason})",
                got=f"PEFT's {kind}",
                remedy="use LoRA, IA³ or prefix tuning",
            )
