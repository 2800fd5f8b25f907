"""One picture of all audits of real models: what is claimed, what was shown, what is certified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shuffled_dpsgd.reports.style import BLUE, HEURISTIC, PROVEN, house_style, save_drawing
from shuffled_dpsgd_experiments.audit_page import Record, bound_of, claim_of, words_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@house_style()
def draw(audits: Sequence[Record]) -> Figure:
    """A line per audit, ε to the right: a bound right of the paper's claim refutes it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 1.6 + 0.42 * len(audits)), layout="constrained")
    axes = figure.subplots()
    looks = {
        "the paper's claim (heuristic)": (HEURISTIC, "x"),
        "strongest joint bound (measured)": (BLUE, "o"),
        "certified (proven)": (PROVEN, "|"),
    }
    values = [
        (
            claim_of(record, "heuristic"),
            bound_of(record),
            claim_of(record, "proven"),
        )
        for record in audits
    ]
    for (label, (colour, mark)), column in zip(
        looks.items(), zip(*values, strict=True), strict=True
    ):
        places = [(x, row) for row, x in enumerate(column) if x is not None]
        axes.plot(
            [x for x, _ in places],
            [row for _, row in places],
            mark,
            color=colour,
            markersize=9,
            markeredgewidth=2,
            label=label,
        )
    axes.set_yticks(range(len(audits)), [words_of(record) for record in audits])
    axes.set_xscale("symlog", linthresh=0.1)
    largest = max(x for row in values for x in row if x is not None)
    axes.set(xlabel="ε", xlim=(-0.02, 2.0 * largest))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def save(audits: Sequence[Record], path: Path) -> None:
    """As SVG or PNG, by the name's ending."""
    save_drawing(draw(audits), path)
