"""Kinds of adapters (PEFT) that cannot be run sample by sample."""

from __future__ import annotations

import torch

from shuffled_dpsgd.errors import InvalidArgumentError

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
