"""A sweep as frozen data: what all cells share, the methods, and the order of the cells."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd.tasks import RunConfig, parse_config
from shuffled_dpsgd.tasks.config import SECTIONS

Stage = Literal["tuning", "main"]
# What a result does not depend on; a cell that was run elsewhere is the same cell.
MACHINE = ("device", "num_threads", "physical_batch_size", "evaluate_every", "checkpoint_every")
# Defaults that have changed since cells were first named.
NAMED_WITH = {"scope": "paper"}


@dataclass(frozen=True, kw_only=True)
class SweptMethod:
    """One row of the table: a name, what it lays over the shared run, what is tuned."""

    name: str
    run: Mapping[str, Any]
    epsilons: tuple[float, ...] | None = None
    batch_clip_ratio: float | None = None
    tuning: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def trials(self) -> list[dict[str, Any]]:
        """Every combination of the tuned keys."""
        values = itertools.product(*self.tuning.values())
        return [dict(zip(self.tuning, each, strict=True)) for each in values]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of the grid, and the name of its result.

    Or one search: of `best_of` runs on average, each one of `candidates`, the best is the result.
    With `own_noise` its noise does not follow the seed.
    """

    sweep: str
    stage: Stage
    method: str
    epsilon: float | None
    seed: int
    config: RunConfig
    tuned: Mapping[str, Any] = field(default_factory=dict)
    best_of: float | None = None
    candidates: tuple[Cell, ...] = ()
    own_noise: bool = False

    @property
    def noisy_config(self) -> RunConfig:
        """What it is trained by. Equal seeds have equal noise, so runs that are priced together
        have none."""
        counted = self.own_noise or self.config.privacy.budget is not None
        return replace(self.config, seed=None) if counted else self.config

    @property
    def described(self) -> dict[str, Any]:
        """The configuration without what names a place or a machine."""
        config = self.config.without_seed()
        config["model"]["name"] = self.config.model.given_name
        config["data"].pop("path", None)
        config["privacy"].pop("budget", None)
        config["data"]["name"] = self.config.data.given_name
        for name in MACHINE:
            config["training"].pop(name, None)
        return config

    @property
    def identity(self) -> dict[str, Any]:
        """What differs from the defaults, so that an option added later changes no name."""
        return identity_of(self.described)

    @cached_property
    def file_name(self) -> str:
        """Where its result goes: readable, and different for every configuration and its noise."""
        return self._name({"streams": STREAM_VERSION})

    @cached_property
    def older_name(self) -> str:
        """What it was called before names said how the noise follows from the seed."""
        return self._name()

    def _name(self, *more: Any) -> str:
        facts = [self.identity, self.seed, self.stage, *more]
        if self.best_of is not None:
            facts += [self.best_of, [each.identity for each in self.candidates]]
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        budget = "" if self.epsilon is None else f"_eps{self.epsilon:g}"
        return f"{self.stage}_{slug(self.method)}{budget}_seed{self.seed}_{digest}.json"

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all cells of all sweeps."""
        return self.sweep, self.file_name

    def describe(self) -> str:
        """One line for people."""
        budget = "" if self.epsilon is None else f", ε = {self.epsilon:g}"
        tuned = "".join(f", {each}" for each in describe_values(self.tuned))
        stage = "tuning " if self.stage == "tuning" else ""
        stage = stage if self.best_of is None else f"best of Poisson({self.best_of:g}) runs of "
        return f"{stage}{self.method}{budget}, seed {self.seed}{tuned}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A whole grid."""

    name: str
    title: str
    results: Path
    run: Mapping[str, Any]
    methods: tuple[SweptMethod, ...]
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    tuning_run: Mapping[str, Any] | None = None
    tuning_epsilon: float | None = None
    best_of: float | None = None

    def tuning_cells(self) -> list[Cell]:
        """Every trial of every method, at the ε tuned at and the first seed; none of searches."""
        if self.best_of is not None:
            return []
        return [
            self._cell("tuning", method, self._tuned_at(method), self.seeds[0], trial)
            for method in self.methods
            for trial in method.trials()
            if method.tuning
        ]

    def main_cells(self, chosen: Mapping[str, Mapping[str, Any]]) -> Iterator[Cell]:
        """The grid itself, with what tuning chose for each method, or searches."""
        for seed in self.seeds:
            for method in self.methods:
                if self._budgets(method) == (None,):
                    yield self._cell("main", method, None, seed, chosen.get(method.name, {}))
            for epsilon in self.epsilons:
                for method in self.methods:
                    if epsilon in self._budgets(method):
                        tuned = chosen.get(method.name, {})
                        cell = self._cell("main", method, epsilon, seed, tuned)
                        yield cell if self.best_of is None else self._search(cell, method)

    def _search(self, cell: Cell, method: SweptMethod) -> Cell:
        trials = [
            self._cell("main", method, cell.epsilon, cell.seed, each) for each in method.trials()
        ]
        return replace(cell, best_of=self.best_of, candidates=tuple(trials))

    def _budgets(self, method: SweptMethod) -> tuple[float | None, ...]:
        return (self.epsilons if method.epsilons is None else method.epsilons) or (None,)

    def _tuned_at(self, method: SweptMethod) -> float | None:
        return None if self._budgets(method) == (None,) else self.tuning_epsilon

    def _cell(
        self,
        stage: Stage,
        method: SweptMethod,
        epsilon: float | None,
        seed: int,
        tuned: Mapping[str, Any],
    ) -> Cell:
        layers = [self.run, method.run]
        if stage == "tuning":
            layers.append(self.tuning_run or {})
        layers += [nested(key, value) for key, value in tuned.items()]
        if epsilon is not None:
            layers.append({"privacy": {"epsilon": epsilon}})
        raw = laid_over(*layers)
        clip = raw.get("privacy", {}).get("clip_norm")
        if method.batch_clip_ratio is not None and isinstance(clip, int | float):
            raw["privacy"]["batch_clip_norm"] = method.batch_clip_ratio * clip
        return Cell(
            sweep=self.name,
            stage=stage,
            method=method.name,
            epsilon=epsilon,
            seed=seed,
            config=parse_config({**raw, "seed": seed}),
            tuned=dict(tuned),
        )


def laid_over(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key, later ones winning; nothing is shared with the arguments.

    >>> laid_over({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                under = found.get(key)
                found[key] = laid_over(under if isinstance(under, Mapping) else {}, value)
            else:
                found[key] = value
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """A dotted key as tables.

    >>> nested("optimizer.learning_rate", 0.1)
    {'optimizer': {'learning_rate': 0.1}}
    """
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def identity_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """What a described configuration has that differs from the defaults."""
    return {
        section: {k: v for k, v in values.items() if _plain(v) != _default(SECTIONS[section], k)}
        if isinstance(values, Mapping)
        else values
        for section, values in described.items()
    }


def _default(section: type, key: str) -> Any:
    """The default of a key as plain data; of one that has none, something nothing equals."""
    if key in NAMED_WITH:
        return NAMED_WITH[key]
    item = next((each for each in fields(section) if each.name == key), None)
    return object() if item is None or item.default is MISSING else _plain(item.default)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def describe_values(settings: Mapping[str, Any]) -> list[str]:
    """Dotted keys with their values, for people.

    >>> describe_values({"optimizer.learning_rate": 0.001, "optimizer.schedule": "linear"})
    ['learning_rate 0.001', 'schedule linear']
    """
    return [f"{key.split('.')[-1]} {describe_value(value)}" for key, value in settings.items()]


def describe_value(value: Any) -> str:
    """A number without superfluous digits; anything else as it is."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def slug(text: str) -> str:
    """A name for files.

    >>> slug("shuffled, c' = 100c")
    'shuffled-c-100c'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
