"""The style of all figures: colours, matplotlib settings, and how they are saved."""

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
# For other series: Okabe and Ito's palette, for colour-blind readers.
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7"

SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.titlecolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "shuffled-dpsgd",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the settings to what is drawn or saved inside, and to nothing else."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        yield


@contextmanager
def drawing(width: float = 5.4, height: float = 3.2) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one set of axes, drawn under the common settings, without global state."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with house_style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        yield figure, axes
        if axes.get_xlabel() == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element without a background; equal input gives equal text."""
    buffer = io.StringIO()
    with house_style():
        _lay_out_once(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def on_white(svg: str) -> str:
    """What `to_svg` returns with a white background, for a file of its own.

    >>> on_white('<svg width="9pt"><g/></svg>')
    '<svg width="9pt"><rect width="100%" height="100%" fill="#ffffff"/><g/></svg>'
    """
    opening, content = svg.split(">", 1)
    return f'{opening}><rect width="100%" height="100%" fill="#ffffff"/>{content}'


def save_drawing(figure: Figure, path: Path) -> None:
    """Write the figure, on white, in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(on_white(to_svg(figure)), encoding="utf-8")
        return
    with house_style():
        _lay_out_once(figure)
        figure.savefig(path)


def save_figure(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write `name.png` and `name.svg` into `directory` and return both paths."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    for path in paths:
        save_drawing(figure, path)
    return paths


def _lay_out_once(figure: Figure) -> None:
    """Compute the layout once; otherwise each save draws the figure twice.

    A figure must be complete when it is first saved.
    """
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
