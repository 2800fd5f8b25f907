"""Activation checkpointing of Hugging Face models, whatever their release calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# From transformers 5.23 on, and before. The later name is asked for first: the other one warns.
_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def checkpoint_activations(model: nn.Module) -> None:
    """Have `model` compute its activations again in the backward instead of keeping them.

    Never by reentrant checkpointing, which runs a backward inside the backward.
    """
    enable: Any = next(
        found for name in _METHODS if (found := getattr(model, name, None)) is not None
    )
    enable({"use_reentrant": False})
