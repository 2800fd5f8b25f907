"""Reads a sweep from TOML: every key known, every cell's configuration checked before any is run.

`[run]` holds what all cells share, as a run's own file would. Each `[[methods]]` has a `name` and a
`[methods.run]` that is laid over it. `epsilons` and `seeds` span the grid; the first seed's cells
all come before the second's. A method may have a `tuning` table: dotted keys with the values to
try, on records held back from training, at one ε for all.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.tasks.config_files import place_paths, refuse_unknown
from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep, SweptMethod, laid_over, slug

_KEYS = ["name", "title", "results", "run", "methods", "epsilons", "seeds", "tuning"]
_WORDS: dict[type, str] = {dict: "a table", list: "a list", str: "a text"}


def load_sweep(
    path: Path,
    *,
    model: str | None = None,
    data: str | None = None,
    results: Path | None = None,
    budget: Path | None = None,
) -> Sweep:
    """Read a sweep file; `model`, `data` and `budget` take the place of the file's.

    Every cell's configuration is checked at once, before anything is trained. Folders of data and
    models in the file are relative to it, the folder of results to the working directory.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            "FILE", expected="a sweep in TOML", got=str(path), remedy=str(error)
        ) from error
    methods = raw.get("methods")
    for holder in (raw, raw.get("tuning"), *(methods if isinstance(methods, list) else ())):
        if isinstance(holder, dict) and isinstance(holder.get("run"), dict):
            place_paths(holder["run"], path.parent)
    return parse_sweep(raw, model=model, data=data, results=results, budget=budget)


def parse_sweep(
    raw: Mapping[str, Any],
    *,
    model: str | None = None,
    data: str | None = None,
    results: Path | None = None,
    budget: Path | None = None,
) -> Sweep:
    """A sweep from plain data, as `load_sweep` reads it."""
    refuse_unknown("", raw, _KEYS)
    run = laid_over(_taken(raw, "run", dict))
    counted = None if budget is None else str(budget.resolve())
    for section, key, value in (
        ("model", "name", model),
        ("data", "path", data),
        ("privacy", "budget", counted),
    ):
        if value is not None:
            run.setdefault(section, {})[key] = value
    tuning = _taken(raw, "tuning", dict, {})
    refuse_unknown("tuning.", tuning, ["epsilon", "run", "best_of"])
    name = _taken(raw, "name", str)
    methods = _taken(raw, "methods", list)
    best_of = _numbers("tuning.best_of", [tuning["best_of"]])[0] if "best_of" in tuning else None
    tuned_at = _numbers("tuning.epsilon", [tuning["epsilon"]]) if "epsilon" in tuning else (None,)
    sweep = Sweep(
        name=name,
        title=_taken(raw, "title", str, name),
        results=results or Path(_taken(raw, "results", str, f"results/{slug(name)}")),
        run=run,
        methods=tuple(_method(place, each) for place, each in enumerate(methods)),
        epsilons=_numbers("epsilons", _taken(raw, "epsilons", list)),
        seeds=tuple(_taken(raw, "seeds", list)),
        tuning_run=_taken(tuning, "run", dict, None, "tuning."),
        tuning_epsilon=tuned_at[0],
        best_of=best_of,
    )
    _check(sweep)
    return sweep


def _check(sweep: Sweep) -> None:
    names = [method.name for method in sweep.methods]
    if len(set(names)) < len(names) or not names or not sweep.seeds:
        raise InvalidArgumentError(
            "methods", expected="at least one seed, and methods of different names", got=names
        )
    for key, values in (("seeds", sweep.seeds), ("epsilons", sweep.epsilons)):
        _refuse_twice(key, values)
    for method in sweep.methods:
        strange = [e for e in method.epsilons or () if e not in sweep.epsilons]
        expected = f"some of the sweep's {list(sweep.epsilons)}"
        remedy = "a cell at another ε would never be run: write it under epsilons too"
        require(not strange, f"methods.{method.name}.epsilons", expected, strange, remedy)
    _check_tuning(sweep)
    for cell in (*sweep.tuning_cells(), *sweep.main_cells({})):
        _check_budget(cell)


def _check_budget(cell: Cell) -> None:
    """Refuse what no budget covers, before anything is spent."""
    counted = cell.config.privacy.budget is not None
    if counted and cell.stage == "tuning" and cell.config.data.heldout_from_train:
        raise InvalidArgumentError(
            "tuning.run.data.heldout_from_train",
            expected="0 under a budget, whose records would be scored without noise",
            got=cell.config.data.heldout_from_train,
            remedy="tune on the held-out split, or by tuning.best_of",
        )


def _check_tuning(sweep: Sweep) -> None:
    """Refuse tuning that is incomplete, or harder for one method than for another."""
    tuned = [method for method in sweep.methods if method.tuning]
    if sweep.best_of is not None:
        _check_searches(sweep)
    elif tuned and sweep.tuning_run is None:
        raise InvalidArgumentError(
            "tuning.run",
            expected="what differs while tuning, such as records held back",
            got=None,
            remedy="write [tuning.run.data] with heldout_from_train = …",
        )
    elif sweep.tuning_epsilon is None and any(method.epsilons != () for method in tuned):
        raise InvalidArgumentError(
            "tuning.epsilon", expected="the ε that methods with a budget are tuned at", got=None
        )
    efforts = {len(method.trials()) for method in tuned}
    if len(efforts) > 1 or (tuned and len(tuned) < len(sweep.methods)):
        raise InvalidArgumentError(
            "tuning",
            expected="as many trials for every method: equal effort",
            got={method.name: len(method.trials()) for method in sweep.methods},
        )


def _check_searches(sweep: Sweep) -> None:
    """Refuse searches that their price does not cover, as far as the file shows it."""
    if sweep.tuning_run is not None or sweep.tuning_epsilon is not None:
        raise InvalidArgumentError(
            "tuning",
            expected="nothing beside best_of: each search trains as the grid says",
            got="epsilon or run",
        )
    for method in sweep.methods:
        if not method.tuning or method.epsilons == ():
            raise InvalidArgumentError(
                f"methods.{method.name}",
                expected="a budget and a tuning table, from which best_of draws its runs",
                got="none",
            )


def _method(place: int, raw: Any) -> SweptMethod:
    if not isinstance(raw, Mapping):
        raise InvalidArgumentError(f"methods[{place}]", expected="a table [[methods]]", got=raw)
    refuse_unknown("methods.", raw, ["name", "run", "epsilons", "batch_clip_ratio", "tuning"])
    prefix = "methods."
    epsilons = _taken(raw, "epsilons", list, None, prefix)
    ratio = raw.get("batch_clip_ratio")
    tuning = _taken(raw, "tuning", dict, {}, prefix)
    return SweptMethod(
        name=_taken(raw, "name", str, prefix=prefix),
        run=_taken(raw, "run", dict, {}, prefix),
        epsilons=None if epsilons is None else _numbers("methods.epsilons", epsilons),
        batch_clip_ratio=None
        if ratio is None
        else _numbers("methods.batch_clip_ratio", [ratio])[0],
        tuning={key: _taken(tuning, key, list, prefix="methods.tuning.") for key in tuning},
    )


_ABSENT: Any = object()


def _taken(
    raw: Mapping[str, Any], key: str, kind: type, default: Any = _ABSENT, prefix: str = ""
) -> Any:
    """The value of a key, of the kind it must have; `default` where there is one and no value."""
    if key not in raw and default is not _ABSENT:
        return default
    if not isinstance(raw.get(key), kind):
        raise InvalidArgumentError(f"{prefix}{key}", expected=_WORDS[kind], got=raw.get(key))
    return raw[key]


def _numbers(key: str, values: Sequence[Any]) -> tuple[float, ...]:
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int | float)]
    if wrong:
        raise InvalidArgumentError(key, expected="a number", got=wrong[0])
    return tuple(float(value) for value in values)


def _refuse_twice(key: str, values: Sequence[Any]) -> None:
    twice = [value for value, count in Counter(map(str, values)).items() if count > 1]
    if twice:
        raise InvalidArgumentError(key, expected="each once", got=f"{twice[0]} twice")
