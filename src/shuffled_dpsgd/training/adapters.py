"""Adapters (PEFT): which kinds are refused, and when an adapter must not be saved alone.

A shuffle that moves the frozen weights keeps the model's function, but the adapter no longer fits
the public model.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from shuffled_dpsgd.errors import InvalidArgumentError


def guard_adapters(model: torch.nn.Module) -> None:
    """From now on refuse to save the adapter of a model whose frozen weights are shuffled.

    `merge_and_unload` returns a model without this refusal.
    """
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        model.save_pretrained = partial(_refuse, type(model).__name__)  # type: ignore[assignment]


# PEFT's kinds of adapters that have no gradient per sample, with the reason.
_UNSUPPORTED = {
    "VBLORA": "it picks vectors of a shared bank by a top-k that vmap cannot run",
    "ADAPTION_PROMPT": "its attention repeats a prompt over the batch by the size of the batch",
    "PROMPT_TUNING": "its prompt is repeated over the batch before it is joined to the inputs",
    "MULTITASK_PROMPT_TUNING": "its prompt is repeated over the batch before it is joined",
    "P_TUNING": "its prompt is repeated over the batch before it is joined to the inputs",
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


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise InvalidArgumentError(
        "save_pretrained",
        expected="the whole model: model.merge_and_unload().save_pretrained(...)",
        got=f"the adapter of a shuffled {name} alone",
        remedy="the shuffle has moved the frozen weights, so the adapter no longer fits the "
        "public model; to save adapters, train with shuffle='off'",
    )
