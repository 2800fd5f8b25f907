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
from shuffled_dpsgd.errors import require
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
PAGE = "reproduction.html"
_INTRODUCTION = (
    "Every figure and table of the paper beside what was found here. Numbers under “paper” are "
    "quoted; all others were produced by a run, whose machine and day stand above its table. The "
    "certified ε is proven and credits the shuffle with nothing; the paper's ε is heuristic."
)
_CSS = """
nav ul { columns: 20rem; padding-left: 1.1rem; }
@media (max-width: 56rem) {
  table, tbody, tr, td { display: block; } tr:first-child, td:empty { display: none; }
  tr { border-bottom: 1px solid var(--line); padding: .5rem 0; } td { border: 0; padding: 0; }
  td:first-child { font-weight: 600; }
  td:not(:first-child)::before { content: attr(data-heading) ": "; color: var(--muted); }
  figure { overflow-x: auto; } figure svg { min-width: 44rem; }
}
"""


def find(names: list[str]) -> list[Reproduction]:
    """The named reproductions in order, `all` for every one."""
    chosen = [*REPRODUCTIONS] if names == ["all"] else names
    for name in chosen:
        expected = f"one of {', '.join(REPRODUCTIONS)}, or all alone"
        remedy = "`shuffled-dpsgd reproduce --list` describes them"
        require(name in REPRODUCTIONS, "name", expected, name, remedy)
    return [REPRODUCTIONS[name] for name in chosen]


def write_page(found: Iterable[Reproduced], directory: Path) -> Path:
    """Write all exhibits into one file, which fetches nothing from anywhere."""
    title, found = "The paper, exhibit by exhibit", list(found)
    links = "".join(f'<li><a href="#{each.name}">{escape(_title(each))}</a></li>' for each in found)
    body = (
        f'<h1>{title}</h1><p class="muted">{today()}</p><p>{escape(_INTRODUCTION)}</p>'
        f"<nav><ul>{links}</ul></nav>{''.join(map(_section, found))}"
    )
    path = directory / PAGE
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title=title, body=body, css=_CSS), encoding="utf-8")
    return path


def _section(each: Reproduced) -> str:
    figure = "" if each.drawing is None else f"<figure>{each.drawing}</figure>"
    if each.exhibit is not None:
        return each.exhibit.to_html(before=figure)
    title = f'<section id="{escape(each.name)}"><h2>{escape(_title(each))}</h2>'
    return f"{title}<p>{escape(each.missing or 'nothing to show')}</p></section>"


def _title(each: Reproduced) -> str:
    return f"{each.name}: {each.title}" if each.exhibit is None else each.exhibit.title
