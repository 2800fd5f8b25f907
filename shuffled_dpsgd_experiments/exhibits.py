"""A reproduced figure or table: its data, a function that shows them, and a plot where it has one.

No number is shown that no run produced. Data whose run is missing are called so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.reports.style import house_style, on_white, save_figure, to_svg
from shuffled_dpsgd_experiments.provenance import code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["demo", "paper"]
SCALES: tuple[Scale, ...] = ("demo", "paper")
HEADINGS = ("", "paper", "ours", "certified ε (proven)", "verdict")
NOT_RUN = "not run here"


@dataclass(frozen=True, kw_only=True)
class ExhibitRow:
    """One line. `certified` is that of the run that gave `ours`; empty where none applies."""

    what: str
    paper: str
    ours: str = NOT_RUN
    certified: str = ""
    verdict: str = ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """In the order of the headings."""
        return self.what, self.paper, self.ours, self.certified, self.verdict


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """What is shown; `origin` says by what, on what and when its numbers were made."""

    name: str
    title: str
    origin: str
    rows: tuple[ExhibitRow, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def to_markdown(self) -> str:
        """For a terminal and for documents."""
        lines = [f"## {self.title}", "", self.origin, ""]
        lines += [_line(HEADINGS), "|---" * len(HEADINGS) + "|"]
        lines += [_line(row.cells()) for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def to_html(self, before: str = "") -> str:
        """A section of a page, escaped, with HTML `before` its table."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in HEADINGS)
        body = "".join(f"<tr>{_html_cells(row)}</tr>" for row in self.rows)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f'<section id="{escape(self.name)}"><h2>{escape(self.title)}</h2>'
            f'<p class="muted">{escape(self.origin)}</p>{before}'
            f"<table><tr>{head}</tr>{body}</table><ul>{notes}</ul></section>"
        )


def in_clips(ratio: float) -> str:
    """A batch clip in units of the clip.

    >>> in_clips(1.0), in_clips(10.0)
    ('c', '10c')
    """
    return "c" if ratio == 1 else f"{ratio:g}c"


def _html_cells(row: ExhibitRow) -> str:
    """Each with its heading, which stands before it where a table is too wide for the screen."""
    named = zip(HEADINGS, row.cells(), strict=True)
    return "".join(f'<td data-heading="{escape(h)}">{escape(cell)}</td>' for h, cell in named)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def origin_of(raw: dict[str, Any]) -> str:
    """Scale, hardware and day of what a table's numbers were made by."""
    env = raw["environment"]
    made = f"Made on {env['hardware']}, {env['date']}, torch {env['torch']}"
    return f"Scale: {raw.get('scale', 'paper')}. {made}{_commit(env)}."


def _commit(env: dict[str, Any]) -> str:
    return f", commit {env['commit'][:7]}{env['commit'][40:]}" if "commit" in env else ""


def figure_exhibit(
    name: str, title: str, raw: dict[str, Any], rows: Sequence[ExhibitRow], note: str
) -> Exhibit:
    """What the paper says of a figure beside its numbers."""
    env = raw["environment"]
    return Exhibit(
        name=name,
        title=f"Figure {name.removeprefix('fig')}: {title[0].lower()}{title[1:]}",
        origin=f"Computed on {env['date']}{_commit(env)}; no training is needed.",
        rows=tuple(rows),
        notes=(note,),
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """How to reproduce: at which scale, into which folder, from which data.

    With `from_results` nothing is run: what is in the folder is shown. `drawings` says whether
    figures are drawn for that, as on a page.
    """

    output: Path
    scale: Scale = "demo"
    from_results: bool = False
    drawings: bool = True
    data: Path | None = None
    say: Callable[[str], object] = lambda line: None


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What a reproduction wrote, and the table and drawing that it shows, or why it shows none."""

    name: str
    title: str
    written: tuple[Path, ...] = ()
    exhibit: Exhibit | None = None
    drawing: str | None = None
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One figure or table: `run` makes its data, `read` finds them, `show` and `draw` are of them.

    `run` gives the files that it wrote. `read` gives None where there are no data. One that
    `redraws` is run for results too, and then only writes anew what follows from them.
    """

    name: str
    title: str
    run: Callable[[Request], list[Path]]
    read: Callable[[Request], Any]
    show: Callable[[Any], Exhibit]
    draw: Callable[[Any], Figure | None] | None = None
    redraws: bool = False

    def reproduce(self, request: Request) -> Reproduced:
        """Run it, or read what an earlier run left, and show that."""
        runs = not request.from_results or (self.redraws and not request.drawings)
        written = self.run(request) if runs else []
        raw = self.read(request)
        if raw is None:
            why = f"no {self.name}.json in {request.output}"
            return Reproduced(name=self.name, title=self.title, missing=why)
        drawing = None
        if self.draw is not None and (written or request.drawings):
            with house_style():
                figure = self.draw(raw)
                drawing = None if figure is None else on_white(to_svg(figure))
                if written and figure is not None:
                    written += save_figure(figure, request.output, written[0].stem)
        return Reproduced(
            name=self.name,
            title=self.title,
            written=tuple(written),
            exhibit=self.show(raw),
            drawing=drawing,
        )


def in_one_file(
    name: str,
    title: str,
    compute: Callable[[Scale], dict[str, Any]],
    show: Callable[[dict[str, Any]], Exhibit],
    draw: Callable[[dict[str, Any]], Figure] | None = None,
    *,
    result: str | None = None,
    has_scales: bool = True,
) -> Reproduction:
    """A reproduction whose data are `NAME.json`, or `NAME_demo.json` at that scale.

    `result` is the file that committed data have where it has another name.
    """

    def file_of(scale: Scale) -> str:
        return f"{name}_demo.json" if has_scales and scale == "demo" else f"{name}.json"

    def run(request: Request) -> list[Path]:
        path = request.output / file_of(request.scale)
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = compute(request.scale)
        raw["environment"] = {**raw.get("environment", environment()), **code()}
        text = json.dumps(raw, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        return [path]

    def read(request: Request) -> dict[str, Any] | None:
        """Of committed data the best there are: at the paper's scale, else a demonstration."""
        names = [file_of(request.scale)]
        if request.from_results:
            names = [result or file_of("paper"), file_of("paper"), file_of("demo")]
        places = (request.output / each for each in names)
        found = next((place for place in places if place.is_file()), None)
        return None if found is None else json.loads(found.read_text(encoding="utf-8"))

    return Reproduction(name=name, title=title, run=run, read=read, show=show, draw=draw)
