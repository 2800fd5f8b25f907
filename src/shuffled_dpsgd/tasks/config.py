"""A training run as frozen data, read from TOML: every key known, every unknown key refused.

The file `docs/training_cli.md` describes each key. `RunConfig` holds no default for ε, δ or the
batch clip of the paper's formula: those decide what may be claimed, so whoever runs decides them.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import Budget, Schedule, help_of
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.generation.config import GenerationConfig
from shuffled_dpsgd.tasks.ranges import check_range
from shuffled_dpsgd.tasks.recipe import with_recipe

TaskName = Literal["digits", "image-classification", "text-classification", "causal-lm"]
OptimizerName = Literal["adamw", "adam", "sgd"]
Precision = Literal["float32", "bf16"]
RateSchedule = Literal["constant", "linear", "cosine"]
Sharding = Literal["replicated", "sharded"]
EmbeddingTraining = Literal["train", "freeze", "freeze-if-found"]
Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model: a name of the catalogue, a local folder, or a hub name.

    `embeddings` is about what the model turns tokens into vectors with; "freeze-if-found" trains
    them where they cannot be told from the model's structure.
    """

    name: str
    from_scratch: bool = False
    lora_rank: int | None = None
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    embeddings: EmbeddingTraining = "train"
    gradient_checkpointing: bool = False

    @property
    def given_name(self) -> str:
        """What the card calls the model: its name, or that of its folder.

        A path that no name on the hub can be is a folder's, also where the folder is missing.
        """
        place = Path(self.name)
        is_path = place.is_absolute() or ".." in place.parts or len(place.parts) > 2
        return place.name if is_path or place.is_dir() else self.name

    def __post_init__(self) -> None:
        check_range("lora_rank", self.lora_rank, 1)
        chosen = [key for key in ("lora_rank", "freeze", "train_only") if getattr(self, key)]
        chosen += ["embeddings"] * (self.embeddings != "train")
        if len(chosen) > 1:
            raise InvalidArgumentError(
                chosen[1],
                expected=f"nothing beside {chosen[0]}: each of them says what is trained",
                got=getattr(self, chosen[1]),
            )


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(Budget):
    """The budget and the mechanism; a file says its clip, which has no default that suits all."""

    clip_norm: float = field(metadata={"help": help_of("clip_norm")})


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: RateSchedule = "constant"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_range("learning_rate", self.learning_rate, 0.0, open_at_low=True)
        check_range("weight_decay", self.weight_decay, 0.0)
        check_range("momentum", self.momentum, 0.0, below=1.0)
        check_range("warmup_steps", self.warmup_steps, 0)
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


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Schedule):
    """How long and in what portions, and on what machine."""

    evaluate_every: int = 20
    checkpoint_every: int = 50
    precision: Precision = "float32"
    device: str = "auto"
    num_threads: int | None = None
    weight_averaging: float = 0.0
    augmentation_multiplicity: int = 0
    sharding: Sharding = "replicated"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("weight_averaging", self.weight_averaging, 0.0, below=1.0)
        check_range("augmentation_multiplicity", self.augmentation_multiplicity, 0)
        if self.augmentation_multiplicity and self.sharding == "sharded":
            raise InvalidArgumentError(
                "training.augmentation_multiplicity",
                expected="0 for a sharded model, with which views are not tested",
                got=self.augmentation_multiplicity,
            )
        check_range("evaluate_every", self.evaluate_every, 1)
        check_range("checkpoint_every", self.checkpoint_every, 1)
        check_range("num_threads", self.num_threads, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run.

    Without `seed` all noise comes from the operating system and nothing can reproduce it; with
    one, whoever learns the seed can remove the noise. Initial weights follow `init_seed`.
    `by_method` has the dotted keys whose values the method chose, for a file was silent.
    """

    task: TaskName
    model: ModelConfig
    data: DataConfig
    privacy: PrivacyConfig
    training: ScheduleConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    generation: GenerationConfig | None = None
    seed: int | None = None
    by_method: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_range("seed", self.seed, 0, below=2**63)
        # With epochs, the number of steps is known when the data are.
        if self.training.num_steps is not None:
            self.optimizer.check_length(self.training.num_steps)
        if self.training.weight_averaging and self.privacy.shuffle != "off":
            raise InvalidArgumentError(
                "training.weight_averaging",
                expected="0 under a shuffle, which puts the weights of every step in another order",
                got=self.training.weight_averaging,
                remedy='set privacy.shuffle = "off", or a method without a shuffle',
            )
        self._check_views()
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

    def _check_views(self) -> None:
        """Refuse several views of what is no image, or where nobody gathers them by record."""
        if not self.training.augmentation_multiplicity:
            return
        wanted = None
        if self.task not in ("digits", "image-classification"):
            wanted = f"0 for {self.task}: only images have views"
        elif self.privacy.method == "opacus":
            wanted = "0 with method 'opacus', which would clip every view by itself"
        if wanted is not None:
            raise InvalidArgumentError(
                "training.augmentation_multiplicity",
                expected=wanted,
                got=self.training.augmentation_multiplicity,
            )

    @property
    def init_seed(self) -> int:
        """Initial weights are public, so they may always be seeded."""
        return self.seed or 0

    def to_json(self) -> dict[str, Any]:
        """Plain data; `parse_config` reads it back. Infinity is the word "inf": JSON has none.

        Every key is written out, so reading it back leaves nothing to the method.
        """
        found = _plain(asdict(self))
        del found["by_method"]
        return found

    def without_seed(self) -> dict[str, Any]:
        """`to_json` for what leaves the run's folder: whoever has the seed can remove the noise."""
        return {key: value for key, value in self.to_json().items() if key != "seed"}


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "privacy": PrivacyConfig,
    "training": ScheduleConfig,
    "optimizer": OptimizerConfig,
    "generation": GenerationConfig,
}
_OPTIONAL = ("generation",)


def load_config(path: Path) -> RunConfig:
    """Read a TOML file; relative folders in it are relative to the file."""
    return parse_config(read_config(path))


def read_config(path: Path) -> dict[str, Any]:
    """What a TOML file states, unchecked; relative folders in it are relative to the file."""
    if not path.is_file():
        raise InvalidArgumentError(
            "--config", expected="a TOML file", got=str(path), remedy="check the path"
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            "--config", expected="TOML in UTF-8", got=str(path), remedy=str(error)
        ) from error
    except OSError as error:
        raise InvalidArgumentError(
            "--config", expected="a file that can be read", got=str(path), remedy=str(error)
        ) from error
    place_paths(raw, path.parent)
    return raw


def place_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make relative paths relative to the file: data always, hub names only if they are there."""
    for section, key in (("data", "path"), ("model", "name")):
        table = raw.get(section)
        if not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        place = (folder / Path(table[key]).expanduser()).resolve()
        may_be_name = section == "model" or "hub" in (table.get("format"), table.get("source"))
        written_as_path = table[key].startswith((".", "/", "~"))
        known = place / "config.json" if section == "model" else place
        if known.exists() or written_as_path or not may_be_name:
            table[key] = str(place)


def parse_config(raw: Mapping[str, Any]) -> RunConfig:
    """Check plain data against the schema and freeze it."""
    if not isinstance(raw, Mapping):
        raise InvalidArgumentError("run", expected="a table of settings", got=type(raw).__name__)
    top, chosen = with_recipe(raw)
    given = {name: top.pop(name, {}) for name in SECTIONS if name in top or name not in _OPTIONAL}
    hints = {"task": TaskName, "seed": int}
    # What is misspelt is named as such, before it is missed.
    refuse_unknown("", top, [*hints, *SECTIONS])
    for name, table in given.items():
        refuse_unknown(f"{name}.", _as_table(name, table), list(_hints_of(SECTIONS[name])))
    _refuse_missing(given)
    sections: dict[str, Any] = {
        name: _parse_section(name, SECTIONS[name], table) for name, table in given.items()
    }
    if "task" not in top:
        raise InvalidArgumentError("task", expected=f"one of {get_args(TaskName)}", got="nothing")
    values = {key: _checked(key, hints[key], value) for key, value in top.items()}
    return RunConfig(**values, **sections, by_method=chosen)


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    """The types of a section's keys. Reading them anew takes longer than the rest of a check."""
    return get_type_hints(kind)


def _as_table(name: str, raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise InvalidArgumentError(name, expected=f"a table [{name}]", got=raw)
    return raw


def _parse_section(name: str, kind: type[Section], raw: Mapping[str, Any]) -> Section:
    hints = _hints_of(SECTIONS[name])
    values = {key: _checked(f"{name}.{key}", hints[key], value) for key, value in raw.items()}
    if values.get("method") == "non-private":
        values.setdefault("clip_norm", math.inf)
    try:
        return kind(**values)
    except InvalidArgumentError as error:
        raise error.about(f"{name}.{error.argument}") from error


def _refuse_missing(given: Mapping[str, Any]) -> None:
    """Name all values at once that a file must give and does not."""
    missing = [
        (name, item.name)
        for name, table in given.items()
        for item in fields(SECTIONS[name])
        if _is_required(item) and item.name not in table
        if (item.name, table.get("method")) != ("clip_norm", "non-private")
    ]
    if missing:
        section, key = missing[0]
        raise InvalidArgumentError(
            f"{section}.{key}",
            expected="a value",
            got="nothing",
            remedy="write " + ", ".join(f"`{key} = …` under [{name}]" for name, key in missing),
        )


def _is_required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def refuse_unknown(prefix: str, raw: Mapping[str, Any], known: list[str]) -> None:
    """Refuse a key that is not known, with the one that was probably meant."""
    for key in raw:
        if key not in known:
            raise InvalidArgumentError(
                f"{prefix}{key}",
                expected=f"one of {sorted(known)}",
                got=key,
                remedy=_nearest(key, known),
            )


def _nearest(word: Any, known: Sequence[str]) -> str:
    """A question about what was probably meant; nothing if nothing known is like it."""
    near = difflib.get_close_matches(word, known, n=1) if isinstance(word, str) else []
    return f"did you mean `{near[0]}`?" if near else ""


def _checked(name: str, hint: Any, value: Any) -> Any:
    """`value` if it is of the hinted type; integers may stand for floats, lists for tuples."""
    choices = get_args(hint)
    if type(None) in choices:
        (inner,) = [choice for choice in choices if choice is not type(None)]
        return _checked(name, inner, value)
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise InvalidArgumentError(
                name, expected=f"one of {choices}", got=value, remedy=_nearest(value, choices)
            )
        return value
    if choices:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise InvalidArgumentError(name, expected="a list of strings", got=value)
        return tuple(value)
    if hint is float and (value == "inf" or type(value) is int):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InvalidArgumentError(name, expected=hint.__name__, got=value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return "inf" if value == math.inf else value
