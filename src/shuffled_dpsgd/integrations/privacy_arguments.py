"""`PrivacyArguments`: the budget as a dataclass that `HfArgumentParser` turns into options."""

from __future__ import annotations

from dataclasses import dataclass, field

from shuffled_dpsgd.options import Budget, help_of


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments(Budget):
    """What a private run promises, beside `TrainingArguments`, which says how it trains.

    One of `epsilon` and `noise_multiplier` must be given. To change a value, make a new object
    with `dataclasses.replace`, which checks it.
    """

    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": f"{help_of('expected_batch_size')} By default per_device_train_batch_size "
            "times gradient_accumulation_steps."
        },
    )
    noise_seed: int | None = field(default=None, metadata={"help": help_of("seed")})
