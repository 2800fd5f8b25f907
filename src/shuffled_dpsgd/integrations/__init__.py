"""Bridges to other libraries: the Hugging Face Trainer, imported when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.options import Budget, help_of

if TYPE_CHECKING:
    from shuffled_dpsgd.integrations.hf_trainer import ShuffledDPTrainer

__all__ = ["PrivacyArguments", "ShuffledDPTrainer"]


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments(Budget):
    """What a private run promises, beside `TrainingArguments`, which says how it trains.

    `HfArgumentParser` turns it into options. One of `epsilon` and `noise_multiplier` must be given.
    To change a value, make a new object with `dataclasses.replace`, which checks it.
    """

    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": f"{help_of('expected_batch_size')} By default per_device_train_batch_size "
            "times gradient_accumulation_steps."
        },
    )
    noise_seed: int | None = field(default=None, metadata={"help": help_of("seed")})


def __getattr__(name: str) -> Any:
    if name == "ShuffledDPTrainer":
        from shuffled_dpsgd.integrations.hf_trainer import ShuffledDPTrainer

        return ShuffledDPTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
