"""The privacy card as HTML: the same order and words as the text card, nothing added."""

from __future__ import annotations

from html import escape

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.core.card import CERTIFIED_METHOD_NOTE
from shuffled_dpsgd.reports.page import page
from shuffled_dpsgd.training.card import (
    AUDITED,
    PAPER,
    REFUTED,
    SMALL_PRINT,
    AuditedBound,
    PrivacyCard,
    paper_inputs,
)

CLAIMS = ("certified ε", PAPER)
CARD_CSS = """
.card { border: 1px solid var(--line); border-radius: 10px; padding: 1.2rem 1.4rem; }
.claims { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); }
.claim { border-left: 5px solid var(--line); padding: .2rem 0 .2rem .9rem; }
.claim b { display: block; font-size: 1.7rem; line-height: 1.25; }
.claim.proven { border-color: var(--proven); } .claim.proven b { color: var(--proven); }
.claim.heuristic { border-color: var(--heuristic); } .claim.heuristic b { color: var(--heuristic); }
.claim.measured { border-color: var(--measured); } .claim.measured b { color: var(--measured); }
.claim.small { color: var(--muted); font-size: .8rem; }
.claim.small .kind { display: block; }
.kind { font-weight: 600; font-size: .8rem; letter-spacing: .02em; }
.refuted { color: var(--refuted); font-weight: 700; }
dl.terms { display: grid; grid-template-columns: 10rem 1fr; gap: .35rem 1rem; margin: 1.2rem 0 0; }
dl.terms dt { color: var(--muted); } dl.terms dd { margin: 0; overflow-wrap: anywhere; }
dl.terms ul { margin: 0; padding-left: 1.1rem; }
@media (max-width: 40rem) { dl.terms { grid-template-columns: 1fr; } }
"""


def card_fragment(card: PrivacyCard) -> str:
    """The card as one `<section>`; `CARD_CSS` styles it."""
    if card.certified is None:
        certified = _box("", "certified ε", card.no_claim, "; ".join(card.why_not_certified))
    else:
        certified = _claim("certified ε", card.certified, CERTIFIED_METHOD_NOTE)
    claims = "".join([certified, _paper(card), *map(_audit, card.audits or (None,))])
    return (
        f'<section class="card"><h2>Privacy card after {card.steps_released} of '
        f'{card.steps_planned} steps</h2><div class="claims">{claims}</div>{_terms(card)}</section>'
    )


def card_page(card: PrivacyCard) -> str:
    """The card as a self-contained page."""
    return page(title="Privacy card", body=card_fragment(card), css=CARD_CSS)


def _box(style: str, label: str, headline: str, text: str) -> str:
    return (
        f'<div class="claim {style}"><span class="kind">{label}</span><b>{escape(headline)}</b>'
        f"{escape(text)}</div>"
    )


def _claim(label: str, claim: PrivacyClaim, note: str) -> str:
    text = f"δ = {claim.delta:.3g}, {claim.method}; {note}"
    return _box(claim.kind, f"{label} · {claim.kind}", f"ε = {claim.epsilon:.4g}", text)


def _paper(card: PrivacyCard) -> str:
    if card.paper is None:
        why = "the formula needs Poisson sampling, a clip and noise"
        return _box("", "paper’s estimate", "none", why)
    note = "; ".join(part for part in (paper_inputs(card.paper), "not a guarantee") if part)
    if not card.paper_is_small_print:
        return _claim("paper’s estimate", card.paper, note)
    return (
        '<div class="claim small"><span class="kind">paper’s estimate · heuristic</span>'
        f"<span>ε = {card.paper.epsilon:.4g}, δ = {card.paper.delta:.3g}; {escape(note)}; "
        f"{escape(SMALL_PRINT)}</span></div>"
    )


def _audit(bound: AuditedBound | None) -> str:
    if bound is None:
        why = "an audit gives lower bounds on ε"
        return _box("", "audited bounds · measured", "none run", why)
    text = f"{bound.adversary}, {bound.estimator}, {bound.confidence:.0%} confidence"
    text = f"{text}, δ = {bound.delta:.3g}"
    return _box("measured", "audited bound · measured", f"ε ≥ {bound.epsilon:.4g}", text)


def _terms(card: PrivacyCard) -> str:
    """The other lines of the card, in its own order."""
    rows = []
    for label, lines in card.sections():
        if label == AUDITED:
            continue
        # The first line of a claim stands above, and so does the small print.
        kept = [line for line in lines[label in CLAIMS :] if line != SMALL_PRINT]
        if kept:
            rows.append(f"<dt>{escape(label)}</dt><dd>{_listed(list(map(_line, kept)))}</dd>")
    return f'<dl class="terms">{"".join(rows)}</dl>'


def _line(text: str) -> str:
    refuted = text.endswith(REFUTED)
    return f'<span class="refuted">{escape(text)}</span>' if refuted else escape(text)


def _listed(lines: list[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"
