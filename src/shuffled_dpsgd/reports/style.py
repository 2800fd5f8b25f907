"""How every figure looks: one palette, one set of matplotlib settings, two file formats."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b1f24"
MUTED = "#6b7280"
GRID = "#e5e7eb"
PROVEN = "#0f6b5c"
HEURISTIC = "#c2571a"
TRAIN = "#3b6fb6"
HELDOUT = "#8a3ffc"
SOFT = "#c7d7ee"

SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "svg.fonttype": "path",
    "svg.hashsalt": "shuffled-dpsgd",
}


@contextmanager
def drawing(width: float = 5.4, height: float = 3.2) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one set of axes, drawn under the common settings, without global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element, ready to sit inside a page; equal input, equal text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save_figure(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write `name.svg` and `name.png` into `directory` and return both paths."""
    import matplotlib

    directory.mkdir(parents=True, exist_ok=True)
    png, svg = directory / f"{name}.png", directory / f"{name}.svg"
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(png, dpi=160)
    svg.write_text(to_svg(figure), encoding="utf-8")
    return [png, svg]
