"""The figures of a training run, drawn from its records; each function draws one on given axes.

Solid green is proven, dashed is heuristic, everything else is measured. A figure without data is
not drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.reports.records import StepRecord, norm_bin_edges
from shuffled_dpsgd.reports.style import (
    HELDOUT,
    HEURISTIC,
    INK,
    MUTED,
    PROVEN,
    SOFT,
    TRAIN,
    drawing,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTTED: dict[str, Any] = {"linewidth": 1, "linestyle": ":"}


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What the figures and the page show of a run."""

    title: str
    records: Sequence[StepRecord]
    clip_norm: float
    epsilon_budget: float | None = None
    budget_kind: str = "proven"
    score_name: str = "accuracy"
    shared_rows: int = 0
    subtitle: str = "Private training with shuffled DP-SGD"
    warnings: Sequence[str] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one field, where it was measured."""
        kept = [r for r in self.records if getattr(r, name) is not None]
        return [r.step for r in kept], [getattr(r, name) for r in kept]


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average without start-up bias.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    total = scale = 0.0
    averages = []
    for value in values:
        total = weight * total + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        averages.append(total / scale)
    return averages


def _noisy(
    axes: Axes, steps: Sequence[int], values: Sequence[float], raw: str = "", averaged: str = ""
) -> None:
    """A curve and its moving average; a label that is empty stays out of the legend."""
    axes.plot(steps, values, color=SOFT, linewidth=1, label=raw)
    axes.plot(steps, smooth(values), color=TRAIN, label=averaged)


def _draw_loss(view: RunView, axes: Axes) -> None:
    """Training loss per step, its moving average, and the held-out loss."""
    _noisy(axes, *view.series("loss"), "training batch", "training, averaged")
    heldout_steps, heldout = view.series("heldout_loss")
    if heldout:
        axes.plot(heldout_steps, heldout, color=HELDOUT, marker="o", ms=3, label="held-out")
    axes.set(title="Loss", xlabel="step", ylabel="loss")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_score(view: RunView, axes: Axes) -> None:
    """The held-out score (accuracy, or perplexity for language models)."""
    steps, scores = view.series("heldout_score")
    axes.plot(steps, scores, color=HELDOUT, marker="o", ms=3)
    last: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "right"}
    axes.annotate(f"{scores[-1]:.3g}", (steps[-1], scores[-1]), color=HELDOUT, **last)
    axes.set(title=f"Held-out {view.score_name}", xlabel="step", ylabel=view.score_name)
    if view.score_name == "accuracy":
        axes.set_ylim(0, 1.02)


def _draw_epsilon(view: RunView, axes: Axes) -> None:
    """ε spent so far: by the certified bound, and by the paper's estimate (heuristic).

    The estimate is thin and grey where the noise was not calibrated by its formula.
    """
    steps, certified = view.series("certified_epsilon")
    paper_steps, paper = view.series("paper_epsilon")
    axes.fill_between(steps, certified, color=PROVEN, alpha=0.10, linewidth=0)
    axes.plot(steps, certified, color=PROVEN, label="certified, spent so far")
    if paper_steps:
        label, colour, width = "paper's estimate (heuristic)", HEURISTIC, 1.8
        if view.budget_kind != "heuristic":
            label, colour, width = f"{label}, noise not its own", MUTED, 0.8
        dashes = (0, (4, 2))
        axes.plot(paper_steps, paper, linestyle=dashes, label=label, color=colour, linewidth=width)
    if view.epsilon_budget is not None:
        label = f"budget ({view.budget_kind})"
        axes.axhline(view.epsilon_budget, color=MUTED, label=label, **DOTTED)
    _set_scale(axes, [certified[-1], *paper[-1:]])
    axes.set(title="Privacy spent", xlabel="step", ylabel="ε")
    axes.legend()


def _set_scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic when the values to compare lie far apart, else linear from zero."""
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)


def _draw_norms(view: RunView, axes: Axes) -> None:
    """Histogram of per-sample gradient norms before clipping, over the whole run."""
    counts: Counter[int] = Counter()
    for record in view.records:
        counts.update(record.norm_counts or {})
    edges = norm_bin_edges()
    for index in range(min(counts), max(counts) + 1):
        left, width = edges[index], edges[index + 1] - edges[index]
        colour = TRAIN if left >= view.clip_norm else SOFT
        axes.bar(left, counts[index], width=width, align="edge", color=colour)
    label = f"clip norm {view.clip_norm:g}"
    axes.axvline(view.clip_norm, color=INK, label=label, **DOTTED)
    axes.set(title="Per-sample gradient norms before clipping", xlabel="norm", ylabel="samples")
    axes.set_xscale("log")
    axes.legend()


def _draw_clipped_share(view: RunView, axes: Axes) -> None:
    """Share of each batch whose gradient was longer than the clip norm."""
    _noisy(axes, *view.series("clipped_share"))
    axes.set(title="Share of clipped samples", xlabel="step", ylabel="share of the batch")
    axes.set_ylim(-0.02, 1.02)


def _draw_signal_to_noise(view: RunView, axes: Axes) -> None:
    """Norm of the clipped sum against the expected norm of the noise added to it."""
    steps, ratios = view.series("signal_to_noise")
    _noisy(axes, steps, ratios)
    axes.axhline(1.0, color=MUTED, label="signal = noise", **DOTTED)
    _set_scale(axes, [1.0, *ratios])
    axes.set(title="Signal to noise", xlabel="step", ylabel="‖clipped sum‖ / E‖noise‖")
    axes.legend()


FIGURES: Mapping[str, tuple[str, Callable[[RunView, Axes], None]]] = {
    "loss": ("loss", _draw_loss),
    "score": ("heldout_score", _draw_score),
    "epsilon": ("certified_epsilon", _draw_epsilon),
    "gradient_norms": ("norm_counts", _draw_norms),
    "clipped_share": ("clipped_share", _draw_clipped_share),
    "signal_to_noise": ("signal_to_noise", _draw_signal_to_noise),
}
"""The field of the records that a figure cannot do without, and what draws it."""


def draw(name: str, view: RunView) -> Figure | None:
    """One of `FIGURES`; None if the run has no data for it."""
    needed, body = FIGURES[name]
    # A step without samples has no norms; a share of zero is a number.
    if not any(value or value == 0 for value in view.series(needed)[1]):
        return None
    with drawing() as (figure, axes):
        body(view, axes)
    return figure


def draw_all(view: RunView) -> dict[str, Figure]:
    """Every figure this run has data for, by name."""
    drawn = {name: draw(name, view) for name in FIGURES}
    return {name: figure for name, figure in drawn.items() if figure is not None}
