"""All exhibits on one page: one file, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from shuffled_dpsgd.environment import today
from shuffled_dpsgd.reports.page import page
from shuffled_dpsgd_experiments.reproductions import Reproduced

FILE = "reproduction.html"
_INTRODUCTION = (
    "Every figure and table of the paper beside what was found here. Numbers under “paper” are "
    "quoted; all others were produced by a run, whose machine and day stand above its table. The "
    "certified ε is proven and credits the shuffle with nothing; the paper's ε is heuristic."
)


def write_page(found: Iterable[Reproduced], directory: Path) -> Path:
    """Write the page into `directory`."""
    sections = "".join(_section(each) for each in found)
    body = (
        "<h1>The paper, exhibit by exhibit</h1>"
        f'<p class="muted">{today()}</p><p>{escape(_INTRODUCTION)}</p>{sections}'
    )
    path = directory / FILE
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title="The paper, exhibit by exhibit", body=body), encoding="utf-8")
    return path


def _section(each: Reproduced) -> str:
    figure = ""
    if each.drawing is not None:
        figure = f"<figure>{each.drawing[each.drawing.index('<svg') :]}</figure>"
    if each.exhibit is not None:
        return each.exhibit.to_html(before=figure)
    title = f'<section id="{escape(each.name)}"><h2>{escape(each.name)}: {escape(each.title)}</h2>'
    found = figure or f"<p>{escape(each.missing or 'nothing to show')}</p>"
    return f"{title}{found}</section>"
