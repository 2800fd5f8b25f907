"""A table as it is shown: what the paper printed, what was found here, what is proven of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

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
    """A reproduced table; `origin` says by what, on what and when its numbers were made."""

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
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells()) + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f'<section id="{escape(self.name)}"><h2>{escape(self.title)}</h2>'
            f'<p class="muted">{escape(self.origin)}</p>{before}'
            f"<table><tr>{head}</tr>{body}</table><ul>{notes}</ul></section>"
        )


def origin_of(raw: dict[str, Any]) -> str:
    """Scale, hardware and day of what a table's numbers were made by."""
    env = raw["environment"]
    scale = raw.get("scale", "paper")
    return f"Scale: {scale}. Made on {env['hardware']}, {env['date']}, torch {env['torch']}."


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
