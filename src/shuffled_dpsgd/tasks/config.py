"""A training run as frozen dataclasses, one for each section of a file, which refuse bad values.

`docs/training_cli.md` describes each key. ε, δ and the batch clip of the paper's formula have no
default, because they decide what may be claimed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.options import Budget, Schedule, help_of
from shuffled_dpsgd.tasks.data.published import PUBLISHED

TaskName = Literal[
    "digits", "image-classification", "image-folder", "text-classification", "causal-lm", "sft"
]
OptimizerName = Literal["adamw", "adam", "sgd"]
Precision = Literal["float32", "bf16"]
RateSchedule = Literal["constant", "linear", "cosine"]
Sharding = Literal["replicated", "sharded", "hybrid"]
EmbeddingTraining = Literal["train", "freeze", "freeze-if-found"]
NamedSet = Literal["sst2", "qqp", "mnli", "qnli", "e2e", "dart", "cifar10", "cifar100"]
DataFormat = Literal["digits", NamedSet, "cifar", "image-folder", "csv", "jsonl", "hub"]
DataSource = Literal["folder", "hub"]
_OF_COLUMNS = ("csv", "jsonl", "hub")
# Keys that only some formats use; the others refuse them.
_USED_BY: Mapping[str, Collection[str]] = {
    "source": PUBLISHED,
    "subset": ("hub",),
    "text_columns": _OF_COLUMNS,
    "label_column": _OF_COLUMNS,
    "exclude_sources": ("dart",),
}
_SPLITS = {
    **dict.fromkeys(("csv", "jsonl", "image-folder"), ("dev", "test")),
    "cifar": ("test",),
}
# Defaults of [data] that depend on the task.
USUAL_DATA: Mapping[str, Mapping[str, Any]] = {
    "sft": {"format": "jsonl", "max_length": 1024},
    "image-folder": {"format": "image-folder"},
}


def _ranged(low: float, default: Any, *, below: float = math.inf, open_at_low: bool = False) -> Any:
    """A key whose number must lie in [low, below), unless it is None."""
    return field(default=default, metadata={"range": (low, below, open_at_low)})


class Section:
    """A part of a configuration, whose numbers are in their ranges."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # of dataclasses alone
            value = getattr(self, item.name)
            if "range" not in item.metadata or value is None:
                continue
            low, below, open_at_low = item.metadata["range"]
            if not low <= value < below or (open_at_low and value == low):
                least = f"more than {low:g}" if open_at_low else f"at least {low:g}"
                most = "" if math.isinf(below) else f" and below {below:g}"
                finite = " and finite" if isinstance(value, float) and math.isinf(below) else ""
                raise InvalidArgumentError(item.name, expected=f"{least}{most}{finite}", got=value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Which model: a name of the catalogue, a local folder, or a hub name.

    With `embeddings = "freeze-if-found"` input embeddings are frozen if they can be found in the
    model's structure, and trained if not.
    """

    name: str
    from_scratch: bool = False
    lora_rank: int | None = _ranged(1, None)
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    embeddings: EmbeddingTraining = "train"
    gradient_checkpointing: bool = False

    @property
    def given_name(self) -> str:
        """What the card calls the model: its name, or the last part of its folder's path."""
        place = Path(self.name)
        is_path = place.is_absolute() or ".." in place.parts or len(place.parts) > 2
        return place.name if is_path or place.is_dir() else self.name

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = [key for key in ("lora_rank", "freeze", "train_only") if getattr(self, key)]
        chosen += ["embeddings"] * (self.embeddings != "train")
        if len(chosen) > 1:
            raise InvalidArgumentError(
                chosen[1],
                expected=f"nothing beside {chosen[0]}: each of them says what is trained",
                got=getattr(self, chosen[1]),
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Which data: a format, and the folder (or hub name) it is read from.

    `heldout_split` is scored instead of the usual split. With `heldout_from_train` that many
    training records are held back and scored instead, for tuning.
    """

    format: DataFormat
    name: str | None = None
    source: DataSource = "folder"
    path: str | None = None
    subset: str | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str = "label"
    num_labels: int | None = None
    label_names: tuple[str, ...] = ()
    exclude_sources: tuple[str, ...] = ()
    max_length: int = _ranged(4, 128)
    max_train_examples: int | None = _ranged(1, None)
    max_heldout_examples: int | None = _ranged(1, None)
    heldout_split: str | None = None
    heldout_from_train: int | None = _ranged(1, None)

    @property
    def given_name(self) -> str:
        """What the card calls the data: the name stated, else the hub's, else the folder's."""
        if self.name is not None or self.path is None:
            return self.name or self.format
        return self.path if self.is_on_hub else f"{self.format} ({Path(self.path).name})"

    @property
    def is_on_hub(self) -> bool:
        """Whether `datasets` loads it."""
        return "hub" in (self.format, self.source)

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in fields(self):
            if self.format == "digits":
                used = item.name in ("format", "name")
            else:
                used = self.format in _USED_BY.get(item.name, (self.format,))
            if not used and getattr(self, item.name) != item.default:
                raise InvalidArgumentError(
                    item.name,
                    expected=f"nothing: data.format {self.format!r} does not use it",
                    got=getattr(self, item.name),
                )
        if self.heldout_split is not None and self.heldout_from_train is not None:
            raise InvalidArgumentError(
                "heldout_split",
                expected="nothing beside heldout_from_train: each of them says what is scored",
                got=self.heldout_split,
            )
        self.check_split(self.heldout_split)
        known = PUBLISHED["dart"].sources
        unknown = [source for source in self.exclude_sources if source not in known]
        require(not unknown, "exclude_sources", f"some of {list(known)}", unknown)

    def check_split(self, split: str | None) -> None:
        """Refuse a held-out split that the data set does not have."""
        facts = PUBLISHED.get(self.format)
        splits = _SPLITS.get(self.format) if facts is None else facts.splits
        if split is not None and splits is not None and split not in splits:
            raise InvalidArgumentError(
                "heldout_split", expected=f"one of {list(splits)} of {self.format}", got=split
            )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Section):
    """How a language model generates the texts that are scored, in transformers' words.

    The prompts of `split` are continued, or `max_prompts` of them. `bleu = "plain"` stands in older
    files and means sacrebleu's score as well.
    """

    max_new_tokens: int = _ranged(1, 64)
    num_beams: int = _ranged(1, 1)
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = _ranged(0, 0)
    split: str | None = None
    max_prompts: int | None = _ranged(1, None)
    bleu: Literal["sacrebleu", "plain"] = "sacrebleu"

    @property
    def search(self) -> dict[str, Any]:
        """The arguments of transformers' `generate`."""
        names = ("max_new_tokens", "num_beams", "length_penalty", "no_repeat_ngram_size")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(Budget):
    """The budget and the mechanism. A file must state its clip norm."""

    clip_norm: float = field(metadata={"help": help_of("clip_norm")})


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: OptimizerName = "adamw"
    learning_rate: float = _ranged(0.0, 1e-3, open_at_low=True)
    weight_decay: float = _ranged(0.0, 0.0)
    momentum: float = _ranged(0.0, 0.0, below=1.0)
    schedule: RateSchedule = "constant"
    warmup_steps: int = _ranged(0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.name != "sgd":
            raise InvalidArgumentError(
                "momentum", expected=f"0: {self.name} has none", got=self.momentum
            )

    def check_length(self, num_steps: int) -> None:
        """Refuse a warm-up that a run of so many steps would never leave."""
        if self.warmup_steps > num_steps:
            raise InvalidArgumentError(
                "optimizer.warmup_steps",
                expected=f"at most {num_steps}, the number of steps of the run",
                got=self.warmup_steps,
                remedy="lower it, or train for longer: training.num_steps, or training.epochs of "
                "⌈records / expected_batch_size⌉ steps",
            )

    def factor_at(self, step: int, num_steps: int) -> float:
        """What the learning rate is multiplied with at `step`, counted from zero.

        >>> config = OptimizerConfig(schedule="linear", warmup_steps=2)
        >>> [config.factor_at(step, 6) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min((step - self.warmup_steps) / max(num_steps - self.warmup_steps, 1), 1.0)
        falling = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return falling.get(self.schedule, 1.0)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Schedule, Section):
    """How long and in what portions, and on what machine."""

    evaluate_every: int = _ranged(1, 20)
    checkpoint_every: int = _ranged(1, 50)
    precision: Precision = "float32"
    device: str = "auto"
    num_threads: int | None = _ranged(1, None)
    weight_averaging: float = _ranged(0.0, 0.0, below=1.0)
    augmentation_multiplicity: int = _ranged(0, 0)
    sharding: Sharding = "replicated"

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        Section.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """One training run.

    Without `seed` all noise comes from the operating system. With one, the run can be repeated, and
    whoever learns the seed can remove the noise. `by_method` has the dotted keys that the method
    chose because the file did not state them.
    """

    task: TaskName
    model: ModelConfig
    data: DataConfig
    privacy: PrivacyConfig
    training: ScheduleConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    generation: GenerationConfig | None = None
    seed: int | None = _ranged(0, None, below=2**63)
    by_method: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A length in epochs becomes a number of steps once the data are loaded.
        if self.training.num_steps is not None:
            self.optimizer.check_length(self.training.num_steps)
        if self.training.weight_averaging and self.privacy.shuffle != "off":
            raise InvalidArgumentError(
                "training.weight_averaging",
                expected="0 under a shuffle, which puts the weights of every step in another order",
                got=self.training.weight_averaging,
                remedy='set privacy.shuffle = "off", or a method without a shuffle',
            )
        views, wanted = self.training.augmentation_multiplicity, None
        if self.task not in ("digits", "image-classification", "image-folder"):
            wanted = f"0 for {self.task}: only images have views"
        elif self.privacy.method == "opacus":
            wanted = "0 with method 'opacus', which would clip every view by itself"
        elif self.training.sharding != "replicated":
            wanted = "0 for a sharded model, with which views are not tested"
        if views and wanted is not None:
            raise InvalidArgumentError(
                "training.augmentation_multiplicity", expected=wanted, got=views
            )
        if self.generation is not None and self.task != "causal-lm":
            raise InvalidArgumentError(
                "generation", expected="nothing: only causal-lm writes texts", got=self.task
            )
        if (self.task == "digits") != (self.data.format == "digits"):
            raise InvalidArgumentError(
                "data.format",
                expected="digits for the task digits, and for no other",
                got=self.data.format,
            )
        if self.task == "image-folder" != self.data.format:
            raise InvalidArgumentError(
                "data.format",
                expected="image-folder, or nothing, for the task image-folder",
                got=self.data.format,
            )

    @property
    def init_seed(self) -> int:
        """The seed of the initial weights, which are public."""
        return self.seed or 0

    def to_json(self) -> dict[str, Any]:
        """Plain data; `parse_config` reads it back. Infinity is the word "inf": JSON has none.

        Every key is written out, so reading it back leaves nothing to the method.
        """
        found: dict[str, Any] = _plain(asdict(self))
        del found["by_method"]
        return found

    def without_seed(self) -> dict[str, Any]:
        """`to_json` without the seed, by which noise can be removed: for what others may see."""
        return {key: value for key, value in self.to_json().items() if key != "seed"}


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "privacy": PrivacyConfig,
    "training": ScheduleConfig,
    "optimizer": OptimizerConfig,
    "generation": GenerationConfig,
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return "inf" if value == math.inf else value
