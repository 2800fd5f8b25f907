"""The δ(ε) that the theorem claims for one step of the ViT, against the true one.

python -m shuffled_dpsgd_experiments.figures.claim_against_truth FILE.svg

Not a figure of the paper. The claim is the theorem's formula (heuristic); the truth is measured by
exact-likelihood draws on the theorem's own worst-case pair, and closed-form for constant vectors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shuffled_dpsgd.accounting import calibrate_paper
from shuffled_dpsgd.accounting.theorem import theorem_delta
from shuffled_dpsgd.reports.style import BLUE, GREEN, INK, MUTED, PURPLE, house_style, save_drawing
from shuffled_dpsgd_experiments.examination.exact import DeltaEstimate, exact_delta
from shuffled_dpsgd_experiments.examination.pairs import Pair, constant_pair, spike_pair
from shuffled_dpsgd_experiments.presets import VIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 41
COLOURS = {"spike": (BLUE, PURPLE), "constant": (GREEN, GREEN)}

Truths: TypeAlias = dict[tuple[str, str], tuple[DeltaEstimate, ...]]
"""True δ(ε) by pair and direction, along the axis of a `Step`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step under the paper's noise; (ε_s, δ_s) is its budget."""

    dimension: int
    batch_clip: float
    noise_multiplier: float
    step_epsilon: float
    step_delta: float

    @cached_property
    def epsilons(self) -> list[float]:
        """From 0 to the plain Gaussian's privacy loss, denser around the step's ε."""
        reach = max(
            2 * self.step_epsilon, 0.5 / self.noise_multiplier**2 + 4 / self.noise_multiplier
        )
        wide, near = (np.linspace(0.0, end, POINTS) for end in (reach, 2 * self.step_epsilon))
        return [float(value) for value in np.union1d(wide, near)]

    def claimed(self) -> list[float]:
        """δ by the theorem, at every ε."""
        d, c, noise = self.dimension, self.batch_clip, self.noise_multiplier
        return [theorem_delta(e, noise, dimension=d, batch_clip=c) for e in self.epsilons]

    def truths(self, pairs: Sequence[Pair], *, draws: int, seed: int) -> Truths:
        """The true δ; of a constant pair both directions are equal."""
        truths: Truths = {}
        noise = self.noise_multiplier
        for pair in pairs:
            found = exact_delta(
                pair, noise_multiplier=noise, epsilons=self.epsilons, draws=draws, seed=seed
            )
            worlds = list(found.items())
            for world, estimates in worlds[:1] if pair.constant_distance is not None else worlds:
                truths[pair.name, "P‖Q" if world == "first" else "Q‖P"] = tuple(estimates)
        return truths


def draw(comparison: Step, truths: Truths) -> Figure:
    """Logarithmic δ; confidence as a band; the step's budget as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes, at = figure.subplots(), comparison.epsilons
    for (pair, direction), estimates in truths.items():
        _draw_truth(axes, at, pair, direction, estimates)
    claimed = np.array(comparison.claimed())
    label = "claimed by the theorem (heuristic)"
    axes.plot(at, np.where(claimed > 0.0, claimed, np.nan), "--", color=INK, label=label)
    axes.plot(comparison.step_epsilon, comparison.step_delta, "o", color=INK, markersize=6)
    axes.annotate(
        f"claimed for one step:\nε = {comparison.step_epsilon:.3g}, "
        f"δ = {comparison.step_delta:.2g}",
        (comparison.step_epsilon, comparison.step_delta),
        xytext=(12, -2),
        textcoords="offset points",
        fontsize=8.5,
        color=MUTED,
        va="top",
    )
    axes.set(xlabel="ε of one step, before sampling", ylabel="δ", yscale="log", ylim=(1e-9, 2.0))
    axes.set_xlim(left=0.0, right=at[-1])
    axes.set_title(
        f"σ = {comparison.noise_multiplier:.3g}, d = {comparison.dimension:,}, "
        f"c'/c = {comparison.batch_clip:g}"
    )
    axes.legend(loc="lower right")
    return figure


def _draw_truth(
    axes: Axes,
    epsilons: Sequence[float],
    pair: str,
    direction: str,
    estimates: tuple[DeltaEstimate, ...],
) -> None:
    colour, kind = COLOURS[pair][direction != "P‖Q"], estimates[0].kind
    named = "both directions" if pair == "constant" else direction
    values, low, high = np.array([(each.delta, each.low, each.high) for each in estimates]).T
    # Where the interval reaches zero the draws no longer resolve δ: draw nothing there.
    resolved = low > 0.0
    shown = np.where(resolved, values, np.nan)
    axes.plot(epsilons, shown, color=colour, label=f"true, {pair}, {named} ({kind})")
    axes.fill_between(epsilons, low, high, where=resolved, color=colour, alpha=0.15, lw=0)


def main(arguments: Sequence[str]) -> None:
    """Draw the ViT at ε = 1 and c' = c to the path given."""
    d, c = VIT.dimension, 1.0
    found = calibrate_paper(epsilon=1.0, **VIT.steps, dimension=d, batch_clip=c).claim.inputs
    step = {name: found[name] for name in ("noise_multiplier", "step_epsilon", "step_delta")}
    comparison = Step(dimension=d, batch_clip=c, **step)
    truths = comparison.truths([spike_pair(d, c), constant_pair(d, c)], draws=20_000, seed=0)
    with house_style():
        save_drawing(draw(comparison, truths), Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
