"""A sweep as frozen data: what all cells share, the methods, and the order of the cells.

A sweep file is TOML. `[run]` holds what all cells share, as a run's own file would. Each
`[[methods]]` has a `name` and a `[methods.run]` that is laid over it. `epsilons` and `seeds` span
the grid; the first seed's cells all come before the second's. A method may have a `tuning` table:
dotted keys with the values to try, on records held back from training, at one ε for all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import RunConfig, parse_config
from shuffled_dpsgd.tasks.config import SECTIONS, place_paths, refuse_unknown

Stage = Literal["tuning", "main"]
_KEYS = ["name", "title", "results", "run", "methods", "epsilons", "seeds", "tuning"]
# What a result does not depend on; a cell that was run elsewhere is the same cell.
MACHINE = ("device", "num_threads", "physical_batch_size", "evaluate_every", "checkpoint_every")


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
    """One training run of the grid, and the name of its result."""

    sweep: str
    stage: Stage
    method: str
    epsilon: float | None
    seed: int
    config: RunConfig
    tuned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def described(self) -> dict[str, Any]:
        """The configuration without what names a place or a machine."""
        config = self.config.without_seed()
        config["model"]["name"] = self.config.model.given_name
        config["data"].pop("path", None)
        config["data"]["name"] = self.config.data.given_name
        for name in MACHINE:
            config["training"].pop(name, None)
        return config

    @property
    def identity(self) -> dict[str, Any]:
        """What differs from the defaults, so that an option added later changes no name."""
        return {
            section: {k: v for k, v in values.items() if v != _default(SECTIONS[section], k)}
            if isinstance(values, dict)
            else values
            for section, values in self.described.items()
        }

    @property
    def file_name(self) -> str:
        """Where its result goes: readable, and different for every configuration."""
        text = json.dumps([self.identity, self.seed, self.stage], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        budget = "" if self.epsilon is None else f"_eps{self.epsilon:g}"
        return f"{self.stage}_{slug(self.method)}{budget}_seed{self.seed}_{digest}.json"

    def describe(self) -> str:
        """One line for people."""
        budget = "" if self.epsilon is None else f", ε = {self.epsilon:g}"
        tuned = "".join(f", {key.split('.')[-1]} {value:g}" for key, value in self.tuned.items())
        stage = "tuning " if self.stage == "tuning" else ""
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

    def tuning_cells(self) -> list[Cell]:
        """Every trial of every method, at the ε tuned at and the first seed."""
        return [
            self._cell("tuning", method, self._tuned_at(method), self.seeds[0], trial)
            for method in self.methods
            for trial in method.trials()
            if method.tuning
        ]

    def main_cells(self, chosen: Mapping[str, Mapping[str, Any]]) -> Iterator[Cell]:
        """The grid itself, with what tuning chose for each method."""
        for seed in self.seeds:
            for method in self.methods:
                if self._budgets(method) == (None,):
                    yield self._cell("main", method, None, seed, chosen.get(method.name, {}))
            for epsilon in self.epsilons:
                for method in self.methods:
                    if epsilon in self._budgets(method):
                        tuned = chosen.get(method.name, {})
                        yield self._cell("main", method, epsilon, seed, tuned)

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
        raw = laid_over(*layers, *(nested(key, value) for key, value in tuned.items()))
        if epsilon is not None:
            raw["privacy"]["epsilon"] = epsilon
        if method.batch_clip_ratio is not None:
            clip = raw["privacy"]["clip_norm"]
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


def load_sweep(
    path: Path,
    *,
    model: str | None = None,
    data: str | None = None,
    results: Path | None = None,
) -> Sweep:
    """Read a sweep file; `model` and `data` name folders in place of the file's.

    Every cell's configuration is checked at once, before anything is trained. Folders of data and
    models in the file are relative to it, the folder of results to the working directory.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            "FILE", expected="a sweep in TOML", got=str(path), remedy=str(error)
        ) from error
    place_paths(raw.get("run", {}), path.parent)
    return parse_sweep(raw, model=model, data=data, results=results)


def parse_sweep(
    raw: Mapping[str, Any],
    *,
    model: str | None = None,
    data: str | None = None,
    results: Path | None = None,
) -> Sweep:
    """A sweep from plain data, as `load_sweep` reads it."""
    refuse_unknown("", raw, _KEYS)
    run = laid_over(_required(raw, "run", dict))
    for section, key, value in (("model", "name", model), ("data", "path", data)):
        if value is not None:
            run.setdefault(section, {})[key] = value
    tuning = raw.get("tuning", {})
    refuse_unknown("tuning.", tuning, ["epsilon", "run"])
    name = _required(raw, "name", str)
    sweep = Sweep(
        name=name,
        title=raw.get("title", name),
        results=results or Path(raw.get("results", f"results/{slug(name)}")),
        run=run,
        methods=tuple(_method(each) for each in _required(raw, "methods", list)),
        epsilons=tuple(float(each) for each in _required(raw, "epsilons", list)),
        seeds=tuple(_required(raw, "seeds", list)),
        tuning_run=tuning.get("run"),
        tuning_epsilon=tuning.get("epsilon"),
    )
    _check(sweep)
    return sweep


def _check(sweep: Sweep) -> None:
    names = [method.name for method in sweep.methods]
    if len(set(names)) < len(names) or not names or not sweep.seeds:
        raise InvalidArgumentError(
            "methods", expected="at least one seed, and methods of different names", got=names
        )
    tuned = [method for method in sweep.methods if method.tuning]
    if tuned and sweep.tuning_run is None:
        raise InvalidArgumentError(
            "tuning.run",
            expected="what differs while tuning, such as records held back",
            got=None,
            remedy="write [tuning.run.data] with heldout_from_train = …",
        )
    efforts = {len(method.trials()) for method in tuned}
    if len(efforts) > 1 or (tuned and len(tuned) < len(sweep.methods)):
        raise InvalidArgumentError(
            "tuning",
            expected="as many trials for every method: equal effort",
            got={method.name: len(method.trials()) for method in sweep.methods},
        )
    sweep.tuning_cells()
    list(sweep.main_cells({}))


def _method(raw: Mapping[str, Any]) -> SweptMethod:
    refuse_unknown("methods.", raw, ["name", "run", "epsilons", "batch_clip_ratio", "tuning"])
    epsilons = raw.get("epsilons")
    return SweptMethod(
        name=_required(raw, "name", str),
        run=raw.get("run", {}),
        epsilons=None if epsilons is None else tuple(float(each) for each in epsilons),
        batch_clip_ratio=raw.get("batch_clip_ratio"),
        tuning=raw.get("tuning", {}),
    )


_WORDS: dict[type, str] = {dict: "a table", list: "a list", str: "a text"}


def _required(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(raw.get(key), kind):
        raise InvalidArgumentError(key, expected=_WORDS[kind], got=raw.get(key))
    return raw[key]


def laid_over(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key, later ones winning; nothing is shared with the arguments.

    >>> laid_over({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                found[key] = laid_over(found.get(key, {}), value)
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


def _default(section: type, key: str) -> Any:
    """The default of a key as plain data; of one that has none, something nothing equals."""
    item = next(each for each in fields(section) if each.name == key)
    return object() if item.default is MISSING else item.default


def slug(text: str) -> str:
    """A name for files.

    >>> slug("shuffled, c' = 100c")
    'shuffled-c-100c'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
