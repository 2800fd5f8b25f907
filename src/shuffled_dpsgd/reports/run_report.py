"""The report of a training run: one self-contained page, and its figures as files."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from shuffled_dpsgd import __version__
from shuffled_dpsgd.reports.figures import RunView, draw_all
from shuffled_dpsgd.reports.page import PARTS, card_files, card_fragment, page, table
from shuffled_dpsgd.reports.records import samples_per_second
from shuffled_dpsgd.reports.style import on_white, save_drawing, to_svg
from shuffled_dpsgd.training.card import PrivacyCard

CAPTIONS: Mapping[str, str] = {
    "loss": "Mean loss of each Poisson batch, and of the held-out data.",
    "score": "On data the model was not trained on.",
    "epsilon": "What was spent up to each step, by the certified bound and by the paper’s "
    "estimate, which is heuristic. What may be claimed is the end of the curve: see the card.",
    "gradient_norms": "All samples of all steps; those right of the line were scaled down to it.",
    "clipped_share": "Samples of each batch whose gradient was longer than the clip norm.",
    "signal_to_noise": "Below the dotted line the noise is longer than the sum it hides.",
}
SHARED_ROWS = (
    "{count:,} of the held-out rows are training records: their scores say little, and no ε covers "
    "publishing them."
)
PRIVATE_METRICS_WARNING = (
    "Training loss, gradient norms, clipped shares and signal-to-noise are computed from the "
    "training data without noise. No ε covers publishing them: this page is for whoever may see "
    "the data. The privacy card alone is safe to publish."
)


def report_page(
    view: RunView,
    card: PrivacyCard,
    *,
    facts: Mapping[str, Any],
    figures: Mapping[str, str] | None = None,
) -> str:
    """The page: results first, then the card, figures, times and configuration.

    `figures` are SVGs by name, if the caller has drawn them already.
    """
    if figures is None:
        figures = {name: to_svg(figure) for name, figure in draw_all(view).items()}
    captions = dict(CAPTIONS)
    if view.shared_rows:
        captions["score"] = "On data the model was trained on as well."
    drawn = "".join(
        f"<figure>{svg}<figcaption>{escape(captions[name])}</figcaption></figure>"
        for name, svg in figures.items()
    )
    body = (
        f"<h1>{escape(view.title)}</h1>"
        f'<p class="muted">{escape(view.subtitle)}</p>'
        f"{_warnings(view)}<section><h2>Results</h2>{table(_results(view))}</section>"
        f"{card_fragment(card)}"
        f'<section><h2>Curves</h2><p class="warning">{escape(PRIVATE_METRICS_WARNING)}</p>'
        f'<br><div class="figures">{drawn}</div></section>'
        f"<section><h2>Time</h2>{table(_times(view))}</section>"
        f"<section><h2>Machine</h2>{table(flatten(view.environment))}</section>"
        f"<section><h2>Settings</h2>{table(flatten(facts))}</section>"
        f"<footer>shuffled-dpsgd {__version__}; this file fetches nothing.</footer>"
    )
    return page(title=view.title, body=body, css=PARTS["card"])


def write_report(
    directory: Path,
    view: RunView,
    card: PrivacyCard,
    *,
    facts: Mapping[str, Any],
) -> list[Path]:
    """Write `report.html`, `privacy_card.{txt,json,html}` and `figures/`; return the paths."""
    figures = draw_all(view)
    drawn = {name: to_svg(figure) for name, figure in figures.items()}
    texts = {
        "report.html": report_page(view, card, facts=facts, figures=drawn),
        **card_files(card),
    }
    written = []
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
        written.append(directory / name)
    for name, figure in figures.items():
        png = directory / "figures" / f"{name}.png"
        save_drawing(figure, png)
        # Drawing is slow, so the page's SVG is used again.
        svg = png.with_suffix(".svg")
        svg.write_text(on_white(drawn[name]), encoding="utf-8")
        written += [png, svg]
    return written


def _warnings(view: RunView) -> str:
    shared = [SHARED_ROWS.format(count=view.shared_rows)] if view.shared_rows else []
    lines = (*shared, *view.warnings)
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in lines)


def _results(view: RunView) -> list[tuple[str, str]]:
    rows = [("steps", str(len(view.records)))]
    for name, label in (("heldout_score", view.score_name), ("heldout_loss", "loss")):
        _, values = view.series(name)
        if values:
            best = min(values) if label in ("loss", "perplexity") else max(values)
            rows.append((f"held-out {label}", f"{values[-1]:.4f} (best {best:.4f})"))
    seconds = sum(record.seconds for record in view.records)
    rows.append(("time in steps", f"{seconds:.1f} s"))
    speed = samples_per_second(view.records)
    rows.append(("samples per second", "not measured" if speed is None else f"{speed:,.0f}"))
    return rows


def _times(view: RunView) -> list[tuple[str, str]]:
    """Where the time went, the longest part first."""
    parts = sorted(view.seconds_by_part.items(), key=lambda part: -part[1])
    whole = sum(view.seconds_by_part.values()) or 1.0
    return [(name, f"{seconds:.1f} s ({seconds / whole:.0%})") for name, seconds in parts]


def flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings by dotted name."""
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", "none" if value == () else str(value)))
    return rows
