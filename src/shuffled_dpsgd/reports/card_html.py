"""The privacy card as HTML: the labels and lines of the text card, in its order."""

from __future__ import annotations

from html import escape

from shuffled_dpsgd.reports.page import page
from shuffled_dpsgd.training.card import AUDITED, PAPER, REFUTED, PrivacyCard

CARD_CSS = """
.card { border: 1px solid var(--line); border-radius: 10px; padding: 1.2rem 1.4rem; }
.card dl { display: grid; grid-template-columns: 11rem 1fr; gap: .35rem 1rem; margin: 0; }
.card dt { color: var(--muted); } .card dd { margin: 0; overflow-wrap: anywhere; }
.card ul { margin: 0; padding-left: 1.1rem; }
.claim { border-left: 5px solid var(--line); padding-left: .9rem; }
.claim li:first-child, .claim > span { font-size: 1.15rem; font-weight: 600; }
.claim.proven { border-color: var(--proven); color: var(--proven); }
.claim.heuristic { border-color: var(--heuristic); color: var(--heuristic); }
.claim.measured { border-color: var(--measured); color: var(--measured); }
.claim.small * { color: var(--muted); font-size: .8rem; font-weight: 400; }
.refuted { color: var(--refuted); font-weight: 700; }
@media (max-width: 40rem) { .card dl { grid-template-columns: 1fr; } }
"""


def card_fragment(card: PrivacyCard) -> str:
    """The card as one `<section>`; `CARD_CSS` styles it."""
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
        rows.append(f"<dt>{escape(shown)}</dt><dd{style}>{_listed(lines)}</dd>")
    return (
        f'<section class="card"><h2>Privacy card after {card.steps_released} of '
        f"{card.steps_planned} steps</h2><dl>{''.join(rows)}</dl></section>"
    )


def card_page(card: PrivacyCard) -> str:
    """The card as a self-contained page."""
    return page(title="Privacy card", body=card_fragment(card), css=CARD_CSS)


def _listed(lines: list[str]) -> str:
    if len(lines) == 1:
        return _line(lines[0])
    return f"<ul>{''.join(f'<li>{_line(line)}</li>' for line in lines)}</ul>"


def _line(text: str) -> str:
    style = ' class="refuted"' if text.endswith(REFUTED) else ""
    return f"<span{style}>{escape(text)}</span>"
