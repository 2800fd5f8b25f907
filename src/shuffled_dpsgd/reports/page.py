"""Every HTML page is one file that fetches nothing; here are its frame, its tables and the card."""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path
from string import Template

from shuffled_dpsgd.reports.style import HEURISTIC, INK, MUTED, PROVEN, TRAIN
from shuffled_dpsgd.training.card import AUDITED, PAPER, REFUTED, PrivacyCard

SHORT = 16
PARTS = tomllib.loads(Path(__file__).with_name("pages.toml").read_text(encoding="utf-8"))
"""Styles and the one script, by name."""
_BASE = Template(PARTS["base"]).substitute(
    ink=INK, muted=MUTED, proven=PROVEN, heuristic=HEURISTIC, train=TRAIN
)


def page(*, title: str, body: str, css: str = "") -> str:
    """A complete HTML document; `body` and `css` must already be safe to embed."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_BASE}{css}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def table(rows: list[tuple[str, str]]) -> str:
    """Two columns, both escaped: a name and a value."""
    return f"<table>{''.join(_row(name, value) for name, value in rows)}</table>"


def breakable(name: str) -> str:
    """The name escaped; its line may break after a dot or an underscore."""
    return re.sub(r"([._])", r"\1<wbr>", escape(name))


def _row(name: str, value: str) -> str:
    """A short value stays on one line."""
    kind = ' class="short"' if len(value) <= SHORT else ""
    return f"<tr><th>{breakable(name)}</th><td{kind}>{escape(value)}</td></tr>"


def card_fragment(card: PrivacyCard) -> str:
    """The card as one `<section>`: the labels and lines of the text card, in its order."""
    kinds = {
        "certified ε": "proven" if card.certified else "",
        PAPER: "heuristic" if card.paper else "",
        AUDITED: "measured",
    }
    rows = []
    for label, lines in card.sections():
        style, shown = "", label
        if label in kinds:
            small = label == PAPER and card.paper is not None and card.paper_is_small_print
            style = f' class="claim {"small" if small else kinds[label]}"'
            shown = " · ".join(part for part in (label, kinds[label]) if part)
        items = f"<ul>{''.join(f'<li>{_line(line)}</li>' for line in lines)}</ul>"
        text = _line(lines[0]) if len(lines) == 1 else items
        rows.append(f"<dt>{escape(shown)}</dt><dd{style}>{text}</dd>")
    return (
        f'<section class="card"><h2>Privacy card after {card.steps_released} of '
        f"{card.steps_planned} steps</h2><dl>{''.join(rows)}</dl></section>"
    )


def card_page(card: PrivacyCard) -> str:
    """The card as a self-contained page."""
    return page(title="Privacy card", body=card_fragment(card), css=PARTS["card"])


def card_files(card: PrivacyCard) -> dict[str, str]:
    """The card as text, as JSON and as a page, by the name of the file."""
    return {
        "privacy_card.txt": f"{card}\n",
        "privacy_card.json": card.dumps() + "\n",
        "privacy_card.html": card_page(card),
    }


def _line(text: str) -> str:
    style = ' class="refuted"' if text.endswith(REFUTED) else ""
    return f"<span{style}>{escape(text)}</span>"
