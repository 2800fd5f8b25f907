"""Figure 3: noise against ε for six settings, shuffled and unshuffled.

The paper's estimate is drawn for three batch clips because the paper does not state its own and it
decides the outcome. The certified curve, which the paper lacks, is what the budget really needs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.accounting import PaperCalibration, calibrate_certified, calibrate_paper
from shuffled_dpsgd.reports.style import BLUE, GREEN, MUTED, ORANGE, PURPLE
from shuffled_dpsgd_experiments.figures.output import FigureRecipe
from shuffled_dpsgd_experiments.figures.settings import SIX, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
BATCH_CLIPS = (1.0, 10.0, 100.0)
CLIP_COLOUR = {1.0: ORANGE, 10.0: PURPLE, 100.0: BLUE}


@dataclass(frozen=True, kw_only=True)
class NoiseCurves:
    """σ at each ε: by the paper with and without shuffling (heuristic), and certified (proven)."""

    setting: Setting
    epsilons: tuple[float, ...]
    unshuffled: tuple[float, ...]
    shuffled: dict[float, tuple[float, ...]]
    certified: tuple[float, ...]

    def shares(self) -> dict[str, list[float]]:
        """Shuffled over unshuffled noise at each ε; the paper's text says 5 to 7 % at 0.25."""
        return {
            f"{clip:g}": [s / u for s, u in zip(values, self.unshuffled, strict=True)]
            for clip, values in self.shuffled.items()
        }


def compute(settings: tuple[Setting, ...] = SIX) -> tuple[NoiseCurves, ...]:
    """All curves of all settings."""
    return tuple(_curves(setting) for setting in settings)


def draw(curves: tuple[NoiseCurves, ...]) -> Figure:
    """Small multiples on common logarithmic axes, one legend."""
    from matplotlib.figure import Figure

    rows = -(-len(curves) // 3)
    figure = Figure(figsize=(9.6, 2.9 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, min(3, len(curves)), sharex=True, sharey=True, squeeze=False)
    for axes, each in zip(panels.flat, curves, strict=False):
        _draw_panel(axes, each)
    for axes in panels[-1]:
        axes.set_xlabel("ε")
    for axes in panels[:, 0]:
        axes.set_ylabel("noise multiplier σ")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def to_json(curves: tuple[NoiseCurves, ...]) -> dict[str, Any]:
    """Everything drawn, with the kind of each curve."""
    return {
        "kinds": {"unshuffled": "proven", "shuffled": "heuristic", "certified": "proven"},
        "panels": [
            {
                **asdict(each),
                "shuffled": {f"{clip:g}": list(v) for clip, v in each.shuffled.items()},
                "shuffled_over_unshuffled": each.shares(),
            }
            for each in curves
        ],
    }


def _curves(setting: Setting) -> NoiseCurves:
    paper = {clip: [_paper(setting, e, clip) for e in EPSILONS] for clip in BATCH_CLIPS}
    return NoiseCurves(
        setting=setting,
        epsilons=EPSILONS,
        unshuffled=tuple(each.unshuffled_noise_multiplier for each in paper[1.0]),
        shuffled={
            clip: tuple(each.noise_multiplier for each in values) for clip, values in paper.items()
        },
        certified=tuple(_certified(setting, e) for e in EPSILONS),
    )


def _paper(setting: Setting, epsilon: float, batch_clip: float) -> PaperCalibration:
    return calibrate_paper(
        epsilon=epsilon,
        delta=setting.delta,
        sampling_prob=setting.sampling_prob,
        num_steps=setting.num_steps,
        dimension=setting.dimension,
        batch_clip=batch_clip,
    )


def _certified(setting: Setting, epsilon: float) -> float:
    return calibrate_certified(
        epsilon=epsilon,
        delta=setting.delta,
        sampling_prob=setting.sampling_prob,
        num_steps=setting.num_steps,
    ).noise_multiplier


def _draw_panel(axes: Axes, curves: NoiseCurves) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.plot(
        curves.epsilons,
        curves.unshuffled,
        "o--",
        color=MUTED,
        markersize=3.5,
        label="unshuffled, advanced composition (proven)",
    )
    axes.plot(
        curves.epsilons,
        curves.certified,
        "o-",
        color=GREEN,
        markersize=4,
        linewidth=2.4,
        label="what ε needs, certified (proven)",
    )
    for clip, values in curves.shuffled.items():
        axes.plot(
            curves.epsilons,
            values,
            "o-",
            color=CLIP_COLOUR[clip],
            markersize=3.5,
            label=f"shuffled, paper's estimate, c' = {_times(clip)}c (heuristic)",
        )
    axes.set(xscale="log", yscale="log", ylim=(0.15, 80))
    axes.set_title(curves.setting.label)
    axes.xaxis.set_major_locator(FixedLocator(list(curves.epsilons)))
    axes.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)


def _times(clip: float) -> str:
    return "" if clip == 1.0 else f"{clip:g}"


RECIPE = FigureRecipe(
    name="fig3",
    title="Noise against ε for six settings",
    compute=compute,
    draw=draw,
    to_json=to_json,
)
