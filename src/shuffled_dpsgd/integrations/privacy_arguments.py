"""`PrivacyArguments`: the budget as a dataclass that `HfArgumentParser` turns into options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class PrivacyArguments:
    """What a private run promises, beside `TrainingArguments`, which says how it trains.

    Not frozen because `HfArgumentParser` also fills dataclasses from files; the plan made from it
    is. One of `epsilon` and `noise_multiplier` must be given.
    """

    delta: float = field(metadata={"help": "δ of every claim; well below 1 / number of records."})
    epsilon: float | None = field(
        default=None, metadata={"help": "Budget; the noise is calibrated to it."}
    )
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "Noise std in units of clip_norm, instead of epsilon."}
    )
    unshuffled_noise_multiplier: float | None = field(
        default=None,
        metadata={"help": "With accounting=paper and noise_multiplier: σ0 of the unmoved block."},
    )
    clip_norm: float = field(
        default=1.0, metadata={"help": "c, the clip of each sample's gradient over all weights."}
    )
    batch_clip_norm: float | None = field(
        default=None, metadata={"help": "c', the clip of the shuffled block as a whole."}
    )
    accounting: Literal["certified", "paper"] = field(
        default="certified",
        metadata={"help": "certified: proven ε. paper: the paper's own formula, heuristic."},
    )
    shuffle: Literal["every-step", "at-release", "off"] = field(
        default="every-step", metadata={"help": "When weights are permuted."}
    )
    scope: Literal["paper", "full"] = field(
        default="paper", metadata={"help": "paper: Theorems 1-2. full: every exact symmetry."}
    )
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Expected size of a Poisson batch; by default per_device_train_batch_size "
            "times gradient_accumulation_steps."
        },
    )
    noise_seed: int | None = field(
        default=None,
        metadata={
            "help": "Repeatable noise, for experiments: whoever knows the seed can remove it. "
            "By default noise comes from the operating system."
        },
    )
