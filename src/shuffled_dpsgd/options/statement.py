"""The options of a private run: name, type, default and one line of help each.

`PrivacyOptions` has all of them. It inherits from `Budget`, which is also the `[privacy]` section
of a TOML file and the Trainer's `PrivacyArguments`, and from `Schedule`, which is also part of the
`[training]` section. `make_private` has the options as parameters; a test compares the two. The
command line takes its help from here.

Each class validates its values when an object is made, before data or model are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.core.plan import (
    Accounting,
    Clip,
    LossReduction,
    NoiseFrame,
    Sampling,
    Scope,
)
from shuffled_dpsgd.options import validation
from shuffled_dpsgd.options.methods import Method, settle, without_privacy

Shuffle = Literal["auto", "every-step", "at-release", "off"]
Noise = Literal["independent", "banded"]
Strategy = Literal["bookkeeping", "mixed", "ghost", "instantiate"]


def _help(text: str) -> dict[str, str]:
    """Metadata as `HfArgumentParser` reads it: each key becomes an argument of argparse."""
    return {"help": text}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata=_help(text))


# ruff: noqa: RUF009 (`_option` is `field`)

_UNIT = (
    "What one row of the data is, such as patient, document or window of 512 tokens: what every "
    "claim is about. row: not stated. With records_per_unit, the column of the data that says "
    "whose each record is, or the ids themselves, one for each record."
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is promised, and the mechanism that keeps the promise.

    `accounting`, `shuffle`, `scope` and `strategy` may be left open when the object is made; the
    method, or the default, fills them in, so that an object always has them.
    """

    delta: float = field(metadata=_help("δ of every claim; well below 1 / number of records."))
    epsilon: float | None = _option(
        None, "Budget ε that the noise is calibrated to; this or noise_multiplier."
    )
    noise_multiplier: float | None = _option(
        None, "Noise std in units of clip_norm; this or epsilon."
    )
    unshuffled_noise_multiplier: float | None = _option(
        None,
        "σ0, the noise multiplier of parameters that do not move; given exactly when "
        "accounting is paper and noise_multiplier is given.",
    )
    clip_norm: float = _option(
        1.0, "c, the clip of each sample's gradient over all trainable weights."
    )
    clip_quantile: float | None = _option(
        None,
        "Share of records whose gradients are to be below the clip, such as 0.5: the clip starts "
        "at clip_norm and follows the norms, within the same ε. None: it stays.",
    )
    batch_clip_norm: float | None = _option(
        None, "c', the clip of the shuffled block as a whole; paper needs it."
    )
    method: Method | None = _option(
        None,
        "A name for a choice of the options below: shuffled (the paper's Algorithm 1), mixopt, "
        "ghost, opacus (needs it installed), certified (recommended) or non-private.",
    )
    accounting: Accounting | None = _option(
        None,
        "What the noise is calibrated by. certified (the default): proven ε, tight. rdp: "
        "proven, looser. paper: the paper's own formula, heuristic.",
    )
    shuffle: Shuffle | None = _option(
        None,
        "When weights are permuted: every-step, at-release or off. auto (the default, unless a "
        "method is named): every step, where some of what is trained can move.",
    )
    scope: Scope | None = _option(
        None,
        "Which weights move. paper: Theorems 1-2. full (the default under shuffle auto): every "
        "exact symmetry.",
    )
    noise_frame: NoiseFrame = _option(
        "shuffled",
        "shuffled: noise is drawn for the weights as they lie. unshuffled: as if they had "
        "never moved, so that runs with and without a shuffle can be compared.",
    )
    noise: Noise = _option(
        "independent",
        "independent: every step has noise of its own. banded: within blocks of steps, noise is "
        "taken away again in part; refused where that gains nothing.",
    )
    bands: int | None = _option(
        None, "Steps in a block of banded noise; by default chosen by the accountant."
    )
    strategy: Strategy | None = _option(
        None,
        "How the clipping engine computes, bookkeeping unless a method is named; never "
        "changes what is released.",
    )
    check_rate: float = _option(
        1 / 256,
        "Share of batches in which a few samples are run once more among other records and "
        "compared; 1 checks every one. First batches and new kinds are always checked.",
    )
    budget: str | None = _option(
        None,
        "File that counts every run on the same records and refuses one too many; made by "
        "shuffled-dpsgd budget new.",
    )
    unit: str = _option("row", _UNIT)
    records_per_unit: int | None = _option(
        None,
        "Protect all of a unit's records together: units are drawn, dataset_size and "
        "expected_batch_size count them, and so many records of each take part at most.",
    )

    def __post_init__(self) -> None:
        kind: type = type(self)
        validation.check_choices(self, _choices(kind))
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        decided = settle(self.method, given)
        if self.method == "non-private":
            decided |= without_privacy(given)
        for name, value in decided.items():
            object.__setattr__(self, name, value)
        validation.check_budget(self)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a run is, and in what portions."""

    expected_batch_size: int = field(
        metadata=_help("B, the expected size of a Poisson batch; actual sizes vary around it.")
    )
    epochs: int | None = _option(None, "Length in epochs of ⌈N/B⌉ steps; this or num_steps.")
    num_steps: int | None = _option(None, "Length in optimizer steps; this or epochs.")
    physical_batch_size: int | None = _option(
        None, "Samples in memory at once; never changes what is released."
    )
    largest_batch: int | None = _option(
        None,
        "M, a hard bound on a batch: of a larger draw so many are kept, and with pad_batches all "
        "batches have that shape. ε counts what it costs: from about B + 6·√B on nothing, below it "
        "much (`advise` has the number for a plan).",
    )

    def __post_init__(self) -> None:
        validation.check_schedule(self)


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions(Budget, Schedule):
    """Everything that can be asked of a private run."""

    dataset_size: int = field(metadata=_help("N, the number of training records."))
    unit: str | Sequence[Hashable] = _option("row", _UNIT)  # type: ignore[assignment]
    clip: Clip = _option(
        "flat",
        "How a sample is clipped: flat, automatic, per-layer, or none, which allows no claim.",
    )
    sampling: Sampling = _option(
        "poisson",
        "poisson: the sampler accounted for. unaccounted: batches of your own, and no claim.",
    )
    adjacency: Adjacency = _option(
        "add-remove", "How neighbouring data sets differ: add-remove or replace-one."
    )
    delta_split: float = _option(0.5, "Share of δ that the paper's formula keeps for composition.")
    loss_reduction: LossReduction = _option(
        "sum", "What a scalar loss is: the sum over its samples, or their mean."
    )
    loss: Callable[[Any, Any], Any] | None = _option(
        None,
        "The loss, as a function of the model and a batch that returns one loss per record. "
        "It is tried out on the first batches; without it the card lists it as not checked.",
    )
    mesh: Any = _option(
        None,
        "The DeviceMesh that fully_shard was given: one axis of ranks that share the weights, or "
        "before it one of copies; or that of parallelize_module. None: the model's.",
    )
    seed: int | None = _option(
        None,
        "Repeatable noise, for experiments: whoever knows the seed can remove it. "
        "None: noise from the operating system.",
    )
    secure: bool | None = _option(
        None, "True: refuse a seed. False: require one. By default neither."
    )
    ledger_path: str | Path | None = _option(
        None, "File that counts releases, written ahead of each; by default kept in memory only."
    )

    def __post_init__(self) -> None:
        Budget.__post_init__(self)
        Schedule.__post_init__(self)
        validation.check_together(self)

    @property
    def needs_blocks(self) -> bool:
        """Whether the model's symmetries matter: something moves, or is clipped as a block."""
        return self.shuffle != "off" or self.batch_clip_norm is not None

    def steps(self) -> int:
        """T = epochs * ceil(N / B), unless given."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.epochs is not None, "checked on construction"
        return self.epochs * math.ceil(self.dataset_size / self.expected_batch_size)


def help_of(name: str) -> str:
    """The line that explains an option.

    >>> help_of("dataset_size")
    'N, the number of training records.'
    """
    return str(_FIELDS[name].metadata["help"])


def choices_of(name: str) -> tuple[str, ...]:
    """The values an option may take, or nothing where it is not a choice.

    >>> choices_of("scope")
    ('paper', 'full')
    """
    return _choices(PrivacyOptions).get(name, ())


def options_in(source: Any) -> dict[str, Any]:
    """The options among the fields of a dataclass instance, with their values."""
    return {
        item.name: getattr(source, item.name) for item in fields(source) if item.name in _FIELDS
    }


@cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    """Read from annotations, because `HfArgumentParser` writes to the fields' own `type`.

    Once for each class: it takes longer than everything else that is checked.
    """
    found = {}
    for name, hint in get_type_hints(kind).items():
        # The choices themselves, of an option that may be left open as well.
        kinds = (hint, *get_args(hint))
        choices = next((get_args(each) for each in kinds if get_origin(each) is Literal), ())
        if choices:
            found[name] = choices
    return found


_FIELDS = {item.name: item for item in fields(PrivacyOptions)}
