"""Everything `shuffled-dpsgd reproduce` can rebuild, by name: figures, tables, claims.

A reproduction runs at a scale, or reads what an earlier run left, and says what it wrote and shows.
`demo` takes minutes on two cores. `paper` takes a GPU, the checkpoints and the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from types import MappingProxyType

from shuffled_dpsgd.environment import today
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.reports.page import page
from shuffled_dpsgd_experiments import claims
from shuffled_dpsgd_experiments.exhibits import Reproduced, Reproduction
from shuffled_dpsgd_experiments.figures import fig1, fig2, noise
from shuffled_dpsgd_experiments.frontier.reproducing import FRONTIER
from shuffled_dpsgd_experiments.tables import table1, table2, table6, table7, table8, training

_ALL: tuple[Reproduction, ...] = (
    FRONTIER,
    fig1.FIGURE,
    fig2.FIGURE,
    *noise.FIGURES,
    table1.TABLE,
    table2.TABLE,
    *training.REPRODUCTIONS,
    table6.TABLE,
    table7.TABLE,
    table8.TABLE,
    claims.CLAIMS,
)
REPRODUCTIONS: Mapping[str, Reproduction] = MappingProxyType({each.name: each for each in _ALL})
EXHIBITS = tuple(name for name in REPRODUCTIONS if name != "claims")
PAGE = "reproduction.html"
_INTRODUCTION = (
    "Every figure and table of the paper beside what was found here. Numbers under “paper” are "
    "quoted; all others were produced by a run, whose machine and day stand above its table. The "
    "certified ε is proven and credits the shuffle with nothing; the paper's ε is heuristic."
)


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


def write_page(found: Iterable[Reproduced], directory: Path) -> Path:
    """Write all exhibits into one file, which fetches nothing from anywhere."""
    title = "The paper, exhibit by exhibit"
    body = (
        f'<h1>{title}</h1><p class="muted">{today()}</p><p>{escape(_INTRODUCTION)}</p>'
        f"{''.join(map(_section, found))}"
    )
    path = directory / PAGE
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title=title, body=body), encoding="utf-8")
    return path


def _section(each: Reproduced) -> str:
    figure = "" if each.drawing is None else f"<figure>{each.drawing}</figure>"
    if each.exhibit is not None:
        return each.exhibit.to_html(before=figure)
    title = f'<section id="{escape(each.name)}"><h2>{escape(each.name)}: {escape(each.title)}</h2>'
    found = figure or f"<p>{escape(each.missing or 'nothing to show')}</p>"
    return f"{title}{found}</section>"
