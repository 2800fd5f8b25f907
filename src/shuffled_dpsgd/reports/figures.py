"""The figures of a training run, drawn from its records; each function draws one.

Solid green is proven, dashed is heuristic, everything else is measured. A figure without data is
not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    moved_by_kind: Mapping[str, int] = field(default_factory=dict)
    unmoved_parameters: int = 0
    subtitle: str = "Private training with shuffled DP-SGD"
    warnings: Sequence[str] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one field, where it was measured."""
        pairs = [(r.step, getattr(r, name)) for r in self.records]
        kept = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in kept], [value for _, value in kept]


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


def draw_loss(view: RunView) -> Figure | None:
    """Training loss per step, its moving average, and the held-out loss."""
    steps, losses = view.series("loss")
    if not steps:
        return None
    heldout_steps, heldout = view.series("heldout_loss")
    with drawing() as (figure, axes):
        axes.plot(steps, losses, color=SOFT, linewidth=1, label="training batch")
        axes.plot(steps, smooth(losses), color=TRAIN, label="training, averaged")
        if heldout_steps:
            axes.plot(heldout_steps, heldout, color=HELDOUT, marker="o", ms=3, label="held-out")
        axes.set(title="Loss", xlabel="step", ylabel="loss")
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure


def draw_score(view: RunView) -> Figure | None:
    """The held-out score (accuracy, or perplexity for language models)."""
    steps, scores = view.series("heldout_score")
    if not steps:
        return None
    with drawing() as (figure, axes):
        axes.plot(steps, scores, color=HELDOUT, marker="o", ms=3)
        axes.annotate(
            f"{scores[-1]:.3g}",
            (steps[-1], scores[-1]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="right",
            color=HELDOUT,
        )
        axes.set(title=f"Held-out {view.score_name}", xlabel="step", ylabel=view.score_name)
        if view.score_name == "accuracy":
            axes.set_ylim(0, 1.02)
    return figure


def draw_epsilon(view: RunView) -> Figure | None:
    """ε spent so far: by the certified bound, and by the paper's estimate (heuristic)."""
    steps, certified = view.series("certified_epsilon")
    if not steps:
        return None
    paper_steps, paper = view.series("paper_epsilon")
    with drawing() as (figure, axes):
        axes.fill_between(steps, certified, color=PROVEN, alpha=0.10, linewidth=0)
        axes.plot(steps, certified, color=PROVEN, label="certified, spent so far")
        if paper_steps:
            _draw_estimate(axes, paper_steps, paper, calibrated=view.budget_kind == "heuristic")
        if view.epsilon_budget is not None:
            label = f"budget ({view.budget_kind})"
            axes.axhline(view.epsilon_budget, color=MUTED, linewidth=1, linestyle=":", label=label)
        _set_scale(axes, [certified[-1], *paper[-1:]])
        axes.set(title="Privacy spent", xlabel="step", ylabel="ε")
        axes.legend()
    return figure


def _draw_estimate(
    axes: Axes, steps: Sequence[int], values: Sequence[float], *, calibrated: bool
) -> None:
    """The paper's estimate: thin and grey where the noise was not `calibrated` by its formula."""
    label = "paper's estimate (heuristic)"
    dashes = (0, (4, 2))
    if calibrated:
        axes.plot(steps, values, color=HEURISTIC, linestyle=dashes, label=label)
    else:
        label += ", noise not its own"
        axes.plot(steps, values, color=MUTED, linewidth=0.8, linestyle=dashes, label=label)


def _set_scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic when the values to compare lie far apart, else linear from zero."""
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)


def draw_norms(view: RunView) -> Figure | None:
    """Histogram of per-sample gradient norms before clipping, over the whole run."""
    counts: dict[int, int] = {}
    for record in view.records:
        for index, count in (record.norm_counts or {}).items():
            counts[index] = counts.get(index, 0) + count
    if not counts:
        return None
    edges = norm_bin_edges()
    low, high = min(counts), max(counts)
    with drawing() as (figure, axes):
        for index in range(low, high + 1):
            clipped = edges[index] >= view.clip_norm
            axes.bar(
                edges[index],
                counts.get(index, 0),
                width=edges[index + 1] - edges[index],
                align="edge",
                color=TRAIN if clipped else SOFT,
            )
        label = f"clip norm {view.clip_norm:g}"
        axes.axvline(view.clip_norm, color=INK, linewidth=1.2, linestyle=":", label=label)
        axes.set_xscale("log")
        title = "Per-sample gradient norms before clipping"
        axes.set(title=title, xlabel="norm", ylabel="samples")
        axes.legend()
    return figure


def draw_clipped_share(view: RunView) -> Figure | None:
    """Share of each batch whose gradient was longer than the clip norm."""
    steps, shares = view.series("clipped_share")
    if not steps:
        return None
    with drawing() as (figure, axes):
        axes.plot(steps, shares, color=SOFT, linewidth=1)
        axes.plot(steps, smooth(shares), color=TRAIN)
        axes.set(title="Share of clipped samples", xlabel="step", ylabel="share of the batch")
        axes.set_ylim(-0.02, 1.02)
    return figure


def draw_signal_to_noise(view: RunView) -> Figure | None:
    """Norm of the clipped sum against the expected norm of the noise added to it."""
    steps, ratios = view.series("signal_to_noise")
    if not steps:
        return None
    with drawing() as (figure, axes):
        axes.plot(steps, ratios, color=SOFT, linewidth=1)
        axes.plot(steps, smooth(ratios), color=TRAIN)
        axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=":", label="signal = noise")
        _set_scale(axes, [1.0, *ratios])
        axes.set(title="Signal to noise", xlabel="step", ylabel="‖clipped sum‖ / E‖noise‖")
        axes.legend()
    return figure


def draw_permutation(view: RunView) -> Figure | None:
    """Parameters each kind of symmetry moves, and those that stay."""
    bars = dict(view.moved_by_kind)
    if view.unmoved_parameters:
        bars["not moved"] = view.unmoved_parameters
    if not bars:
        return None
    names = list(bars)
    colours = [MUTED if name == "not moved" else TRAIN for name in names]
    with drawing(height=1.2 + 0.32 * len(names)) as (figure, axes):
        axes.barh(names, list(bars.values()), color=colours, height=0.62)
        for place, name in enumerate(names):
            axes.annotate(
                f"{bars[name]:,}",
                (bars[name], place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.grid(axis="y", visible=False)
        axes.set(title="Parameters moved by the shuffle", xlabel="parameters")
    return figure


FIGURES: Mapping[str, Callable[[RunView], Figure | None]] = {
    "loss": draw_loss,
    "score": draw_score,
    "epsilon": draw_epsilon,
    "gradient_norms": draw_norms,
    "clipped_share": draw_clipped_share,
    "signal_to_noise": draw_signal_to_noise,
    "permutation": draw_permutation,
}


def draw_all(view: RunView) -> dict[str, Figure]:
    """Every figure this run has data for, by name."""
    drawn = {name: draw(view) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}
