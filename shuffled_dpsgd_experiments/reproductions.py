"""Everything `shuffled-dpsgd reproduce` can rebuild, by name: figures, tables, claims.

A reproduction runs at a scale, or reads what an earlier run left, and says what it wrote and shows.
`demo` takes minutes on two cores. `paper` takes a GPU, the checkpoints and the data. No number
appears that no run produced: a table whose runs are missing says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal, Protocol

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.claims import Claims
from shuffled_dpsgd_experiments.figures import FIGURES, FigureRecipe
from shuffled_dpsgd_experiments.figures.statements import exhibit_of
from shuffled_dpsgd_experiments.frontier.reproducing import FrontierReproduction
from shuffled_dpsgd_experiments.tables import table1, table2, table6, table7, table8, training
from shuffled_dpsgd_experiments.tables.exhibit import Exhibit

Scale = Literal["demo", "paper"]
SCALES: tuple[Scale, ...] = ("demo", "paper")


@dataclass(frozen=True, kw_only=True)
class Request:
    """How to reproduce: at which scale, into which folder, from which data.

    With `from_results` nothing is run: what is in the folder is shown. Figures whose numbers are
    there are drawn from them only where `drawings` are wanted, as for a page.
    """

    output: Path
    scale: Scale = "demo"
    from_results: bool = False
    drawings: bool = True
    data: Path | None = None
    say: Callable[[str], object] = lambda line: None


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What a reproduction wrote, and the table or drawing it shows."""

    name: str
    title: str
    written: tuple[Path, ...] = ()
    exhibit: Exhibit | None = None
    drawing: str | None = None
    missing: str | None = None


class Reproduction(Protocol):
    """One figure or table of the paper."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def reproduce(self, request: Request) -> Reproduced: ...


@dataclass(frozen=True, kw_only=True)
class FigureReproduction:
    """A figure: computed in seconds at any scale."""

    recipe: FigureRecipe[Any]

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def title(self) -> str:
        return self.recipe.title

    def reproduce(self, request: Request) -> Reproduced:
        if not request.from_results:
            written = tuple(self.recipe.reproduce(request.output))
            return self._shown(request.output, written=written)
        drawn = request.output / f"{self.name}.svg"
        if drawn.with_suffix(".json").is_file() and (drawn.is_file() or not request.drawings):
            return self._shown(request.output, written=())
        # Seconds of arithmetic: done again, and nothing in the folder is touched.
        with TemporaryDirectory() as place:
            self.recipe.reproduce(Path(place))
            return self._shown(Path(place), written=())

    def _shown(self, folder: Path, *, written: tuple[Path, ...]) -> Reproduced:
        raw = json.loads((folder / f"{self.name}.json").read_text(encoding="utf-8"))
        drawn = folder / f"{self.name}.svg"
        return Reproduced(
            name=self.name,
            title=self.title,
            written=written,
            exhibit=exhibit_of(self.name, self.title, raw),
            drawing=drawn.read_text(encoding="utf-8") if drawn.is_file() else None,
        )


@dataclass(frozen=True, kw_only=True)
class ClaimsReproduction:
    """The figures of docs/claims.md."""

    claims: Claims = field(default_factory=Claims)
    name: str = "claims"

    @property
    def title(self) -> str:
        return self.claims.title

    def reproduce(self, request: Request) -> Reproduced:
        if not request.from_results:
            written = tuple(self.claims.reproduce(request.output))
            return Reproduced(name=self.name, title=self.title, written=written)
        path = request.output / f"{self.name}.json"
        if not path.is_file():
            return _missing(self, f"no {path.name} in {request.output}")
        return _missing(self, f"every figure is in {path}; docs/claims.md says what they mean")


@dataclass(frozen=True, kw_only=True)
class TableReproduction:
    """A table whose raw numbers are one JSON file: `tableN.json`, or `tableN_demo.json`."""

    name: str
    title: str
    run: Callable[[str], dict[str, Any]]
    exhibit: Callable[[dict[str, Any]], Exhibit]
    result: str | None = None

    def reproduce(self, request: Request) -> Reproduced:
        path = self._path(request)
        written: tuple[Path, ...] = ()
        if not request.from_results:
            raw = self.run(request.scale)
            path = request.output / _file_name(self.name, request.scale)
            _write(path, raw)
            written = (path,)
        elif path is None:
            return _missing(self, f"no {self.name}.json in {request.output}")
        else:
            raw = json.loads(path.read_text(encoding="utf-8"))
        return Reproduced(
            name=self.name, title=self.title, written=written, exhibit=self.exhibit(raw)
        )

    def _path(self, request: Request) -> Path | None:
        """The best result there is: at the paper's scale, else a demonstration."""
        names = [_file_name(self.name, scale) for scale in ("paper", "demo")]
        places = [request.output / name for name in (self.result or names[0], *names)]
        return next((place for place in places if place.is_file()), None)


@dataclass(frozen=True, kw_only=True)
class TrainingReproduction:
    """A table made of training runs, each a cell of a sweep."""

    table: training.TrainingTable

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def title(self) -> str:
        return self.table.title

    def reproduce(self, request: Request) -> Reproduced:
        scale = request.scale
        if not request.from_results:
            training.run(self.table, scale, request.output, data=request.data, say=request.say)
            records = training.records_for(self.table, request.output, scale)
        else:
            found = {s: training.records_for(self.table, request.output, s) for s in SCALES}
            scale = "paper" if found["paper"] or not found["demo"] else "demo"
            records = found[scale]
        return Reproduced(
            name=self.name,
            title=self.title,
            exhibit=training.exhibit(self.table, records, scale),
        )


def _table(module: Any, name: str) -> TableReproduction:
    return TableReproduction(
        name=name,
        title=module.TITLE,
        run=module.run,
        exhibit=module.exhibit,
        result=getattr(module, "RESULT", None),
    )


def _all() -> dict[str, Reproduction]:
    found: dict[str, Reproduction] = {
        name: FigureReproduction(recipe=recipe) for name, recipe in FIGURES.items()
    }
    trained = {name: TrainingReproduction(table=of) for name, of in training.TABLES.items()}
    tables: dict[str, Reproduction] = {
        "table1": _table(table1, "table1"),
        "table2": _table(table2, "table2"),
        **trained,
        "table6": _table(table6, "table6"),
        "table7": _table(table7, "table7"),
        "table8": _table(table8, "table8"),
    }
    return {
        "frontier": FrontierReproduction(),
        **found,
        **tables,
        "claims": ClaimsReproduction(),
    }


REPRODUCTIONS: Mapping[str, Reproduction] = MappingProxyType(_all())
EXHIBITS = tuple(name for name in REPRODUCTIONS if name != "claims")


def find(names: list[str]) -> list[Reproduction]:
    """The named reproductions in order, `all` for every exhibit of the paper."""
    chosen = [*EXHIBITS] if names == ["all"] else names
    for name in chosen:
        if name not in REPRODUCTIONS:
            raise InvalidArgumentError(
                "name",
                expected=f"one of {', '.join(REPRODUCTIONS)}, or all alone",
                got=name,
                remedy="`shuffled-dpsgd reproduce --list` describes them",
            )
    return [REPRODUCTIONS[name] for name in chosen]


def _file_name(name: str, scale: str) -> str:
    return f"{name}.json" if scale == "paper" else f"{name}_{scale}.json"


def _write(path: Path, raw: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(raw, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _missing(reproduction: Reproduction, why: str) -> Reproduced:
    return Reproduced(name=reproduction.name, title=reproduction.title, missing=why)
