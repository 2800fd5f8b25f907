"""Checkpointing is asked for under the name that a model has, and never reentrant."""

from __future__ import annotations

from typing import Any

from torch import nn

from shuffled_dpsgd.models import checkpoint_activations


class Earlier(nn.Module):
    """A model of a release before transformers 5.23."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, Any]] = []

    def gradient_checkpointing_enable(self, given: dict[str, Any]) -> None:
        self.asked.append(("gradient", given))


class Later(Earlier):
    """One of a release that has both names."""

    def activation_checkpointing_enable(self, given: dict[str, Any]) -> None:
        self.asked.append(("activation", given))


def test_the_name_that_the_release_prefers() -> None:
    for model, name in ((Earlier(), "gradient"), (Later(), "activation")):
        checkpoint_activations(model)
        assert model.asked == [(name, {"use_reentrant": False})]
