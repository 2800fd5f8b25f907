"""Bridges to other libraries: trainers of Hugging Face and TRL, imported when first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.errors import MissingExtraError
from shuffled_dpsgd.options import Budget, help_of
from shuffled_dpsgd.options.other_names import answers_other_names

if TYPE_CHECKING:
    from shuffled_dpsgd.integrations.hf_trainer import DPTrainer, ShuffledDPTrainer
    from shuffled_dpsgd.integrations.trl_trainers import DPDPOTrainer, DPSFTTrainer

__all__ = ["DPDPOTrainer", "DPSFTTrainer", "DPTrainer", "PrivacyArguments", "ShuffledDPTrainer"]

_HOMES = {
    "DPTrainer": "hf_trainer",
    "ShuffledDPTrainer": "hf_trainer",
    "DPSFTTrainer": "trl_trainers",
    "DPDPOTrainer": "trl_trainers",
}
_EXTRAS = {"transformers": "hf", "trl": "trl"}


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
    largest_batch: int | None = field(default=None, metadata={"help": help_of("largest_batch")})
    noise_seed: int | None = field(default=None, metadata={"help": help_of("seed")})


setattr(PrivacyArguments, "__init__", answers_other_names(PrivacyArguments.__init__))  # noqa: B010


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            extra = _EXTRAS[error.name]
            raise MissingExtraError(error.name, extra=extra, purpose=name) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
