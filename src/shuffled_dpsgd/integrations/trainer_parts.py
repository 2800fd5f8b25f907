"""What the Trainer's loop uses in a private run: optimizer, collator, logs, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import TrainerCallback

from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL
from shuffled_dpsgd.training import PrivateTraining, SpendingCurve

Collate = Callable[[list[Any]], Any]


class SteppedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step has already happened.

    The Trainer calls `optimizer.step()` after each turn of its loop. In private training the update
    is part of `private.step()`; a second one would be un-privatized, and is refused by the run.
    The Trainer, its accelerator and the schedulers get this in place of the real optimizer: it has
    the same parameter groups and state, and a `step` that does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Deliberately without super().__init__(), which would make groups of its own.
        self._inner = optimizer

    param_groups: Any = property(lambda self: self._inner.param_groups)
    state: Any = property(lambda self: self._inner.state)
    defaults: Any = property(lambda self: self._inner.defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the private step has updated the weights."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the private step leaves no gradients."""

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)


@dataclass(frozen=True, kw_only=True)
class PaddedCollator:
    """A Trainer's collator that can also pad to a length it is given, where a mask hides it.

    A batch without an attention mask is not padded, because the model would see the padding. An
    input that does not hold one number per token is not padded either.
    """

    collate: Collate
    pad_id: int

    def __call__(self, samples: list[Any]) -> Any:
        """The batch as the collator makes it."""
        return self.collate(samples)

    def to_length(self, samples: list[Any], length: int) -> Any:
        """The batch with every sample padded on the right to `length` tokens."""
        batch = self.collate(samples)
        if not isinstance(batch, Mapping) or not {"input_ids", "attention_mask"} <= batch.keys():
            return batch
        shape = batch["input_ids"].shape
        values = {"input_ids": self.pad_id, "labels": IGNORED_LABEL}
        return {
            key: F.pad(value, (0, length - shape[1]), value=values.get(key, 0))
            if getattr(value, "shape", None) == shape and length > shape[1]
            else value
            for key, value in batch.items()
        }


def with_lengths(collate: Collate, tokenizer: Any) -> Collate:
    """The collator as a `PaddedCollator`, if the tokenizer pads on the right and knows its id."""
    pad_id = getattr(tokenizer, "pad_token_id", None)
    if pad_id is None or getattr(tokenizer, "padding_side", "right") != "right":
        return collate
    return PaddedCollator(collate=collate, pad_id=int(pad_id))


def spending_of_step(private: PrivateTraining, curve: SpendingCurve) -> dict[str, float]:
    """What a step adds to the Trainer's logs; every epsilon says in its name what it is."""
    metrics, spent = private.last_metrics, private.ledger.spent
    assert metrics is not None
    certified, paper = curve.certified(spent), curve.paper(spent)
    whole = curve.certified(private.plan.num_steps)
    values = {
        "certified_epsilon_spent_so_far": None if certified is None else certified.epsilon,
        "certified_epsilon_of_plan": None if whole is None else whole.epsilon,
        "paper_epsilon_heuristic": None if paper is None else paper.epsilon,
        "clipped_share": metrics.clipped_share,
        "median_sample_norm": metrics.median_norm,
    }
    return {key: value for key, value in values.items() if value is not None}


class StopWhenSpent(TrainerCallback):
    """Ends training when the ledger allows no further step (lost steps of a crash count too)."""

    def __init__(self, find_run: Callable[[], PrivateTraining | None]) -> None:
        self._find_run = find_run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        private = self._find_run()
        if private is not None and private.finished:
            control.should_training_stop = True
        return control
