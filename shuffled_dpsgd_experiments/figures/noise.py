"""Figures 3 and 4: the noise that the paper's formula asks for.

Figure 3 has noise against ε for six settings. The paper's estimate is drawn for three batch clips,
because the paper does not state its own and it decides the outcome. The certified curve, which the
paper lacks, is what the budget really needs. Figure 4 is a heat map over ε and dimension for ViT on
CIFAR-100 and c' = c (the paper names neither; its text implies the latter); d = 1 is unshuffled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shuffled_dpsgd.accounting import calibrate_certified, calibrate_paper, certified_bracket
from shuffled_dpsgd.reports.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE
from shuffled_dpsgd_experiments.exhibits import (
    Exhibit,
    ExhibitRow,
    figure_exhibit,
    in_clips,
    in_one_file,
)
from shuffled_dpsgd_experiments.presets import SIX, VIT, Preset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES, MAP = "Noise against ε for six settings", "The paper's noise over ε and dimension"
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
BATCH_CLIPS = (1.0, 10.0, 100.0)
CLIP_COLOUR = {"1": ORANGE, "10": PURPLE, "100": BLUE}
MAP_EPSILONS = (0.1, *EPSILONS)
DIMENSIONS = (1, 10**2, 10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
SHARES = (0.05, 0.07)
"""The paper: at ε = 0.25 shuffled noise is merely 5 to 7 % of unshuffled noise."""
_SETTINGS = {setting.label: setting for setting in SIX}


def paper_noise(setting: Preset, epsilon: float, dimension: int, batch_clip: float = 1.0) -> float:
    """σ by the paper's formula; a dimension of 1 is training without a shuffle."""
    return calibrate_paper(
        epsilon=epsilon, dimension=dimension, batch_clip=batch_clip, **setting.steps
    ).noise_multiplier


def compute_curves(settings: Sequence[Preset] = SIX) -> dict[str, Any]:
    """σ at each ε: by the paper with and without shuffling (heuristic), and certified (proven)."""
    return {
        "kinds": {"unshuffled": "proven", "shuffled": "heuristic", "certified": "proven"},
        "panels": [_panel(setting) for setting in settings],
    }


def _panel(setting: Preset) -> dict[str, Any]:
    unshuffled = [paper_noise(setting, e, 1) for e in EPSILONS]
    shuffled = {
        f"{clip:g}": [paper_noise(setting, e, setting.dimension, clip) for e in EPSILONS]
        for clip in BATCH_CLIPS
    }
    return {
        "setting": setting.described,
        "epsilons": list(EPSILONS),
        "unshuffled": unshuffled,
        "shuffled": shuffled,
        "certified": [
            calibrate_certified(epsilon=e, **setting.steps).noise_multiplier for e in EPSILONS
        ],
        "shuffled_over_unshuffled": {
            clip: [s / u for s, u in zip(values, unshuffled, strict=True)]
            for clip, values in shuffled.items()
        },
    }


def compute_map() -> dict[str, Any]:
    """`noise_multiplier[i][j]` at `epsilons[i]` and `dimensions[j]`; heuristic for d > 1."""
    return {
        "kind": "heuristic",
        "setting": VIT.described,
        "batch_clip": 1.0,
        "epsilons": list(MAP_EPSILONS),
        "dimensions": list(DIMENSIONS),
        "noise_multiplier": [[paper_noise(VIT, e, d) for d in DIMENSIONS] for e in MAP_EPSILONS],
    }


def show_curves(raw: dict[str, Any]) -> Exhibit:
    """The share that the paper's text states, held against every batch clip."""
    rows = []
    for panel in raw["panels"]:
        epsilon = panel["epsilons"][0]
        shares = {clip: values[0] for clip, values in panel["shuffled_over_unshuffled"].items()}
        widest = max(shares, key=float)
        inside = [clip for clip, share in shares.items() if SHARES[0] <= share <= SHARES[1]]
        certified = _certified(panel["setting"]["label"], panel["shuffled"][widest][0])
        where = f"at c' = {in_clips(float(inside[0]))}" if inside else "at none of the three c'"
        rows.append(
            ExhibitRow(
                what=f"{panel['setting']['label']}: shuffled over unshuffled noise at "
                f"ε = {epsilon:g}",
                paper=f"{100 * SHARES[0]:g} to {100 * SHARES[1]:g} %",
                ours="; ".join(
                    f"{share:.1%} at c' = {in_clips(float(c))}" for c, share in shares.items()
                ),
                certified=f"{certified:.3g} at c' = {in_clips(float(widest))}",
                verdict=f"as printed {where}; ε = {epsilon:g} is {_standing(certified, epsilon)}",
            )
        )
    note = "The paper does not state c'. A smaller c' needs less noise, and less is proven of it."
    return figure_exhibit("fig3", CURVES, raw, rows, note)


def show_map(raw: dict[str, Any]) -> Exhibit:
    """How far the noise drops with the dimension, at the smallest and the largest ε."""
    rows = []
    for place in (0, -1):
        epsilon, noise = raw["epsilons"][place], raw["noise_multiplier"][place]
        certified = _certified(raw["setting"]["label"], noise[-1])
        drops = "as described" if noise[-1] < noise[0] / 2 else "does not drop much"
        rows.append(
            ExhibitRow(
                what=f"σ at ε = {epsilon:g}, from d = 1 to "
                f"d = 10^{round(math.log10(raw['dimensions'][-1]))}",
                paper="drops drastically; ε barely matters any more",
                ours=f"{noise[0]:.3g} → {noise[-1]:.3g}",
                certified=f"{certified:.3g}",
                verdict=f"{drops}; ε = {epsilon:g} is {_standing(certified, epsilon)} of that "
                "noise",
            )
        )
    clip = in_clips(raw["batch_clip"])
    note = f"{raw['setting']['label']}, c' = {clip}; the paper names neither."
    return figure_exhibit("fig4", MAP, raw, rows, note)


def _standing(certified: float, epsilon: float) -> str:
    return "proven" if certified <= epsilon else "claimed, not proven"


@cache
def _certified(label: str, noise_multiplier: float) -> float:
    return certified_bracket(noise_multiplier=noise_multiplier, **_SETTINGS[label].steps).upper


def draw_curves(raw: dict[str, Any]) -> Figure:
    """Small multiples on common logarithmic axes, one legend."""
    from matplotlib.figure import Figure

    rows = -(-len(raw["panels"]) // 3)
    figure = Figure(figsize=(9.6, 2.9 * rows + 0.6), layout="constrained")
    columns = min(3, len(raw["panels"]))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, each in zip(panels.flat, raw["panels"], strict=False):
        _draw_panel(axes, each)
    for axes in panels[-1]:
        axes.set_xlabel("ε")
    for axes in panels[:, 0]:
        axes.set_ylabel("noise multiplier σ")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _draw_panel(axes: Axes, panel: dict[str, Any]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    def curve(values: list[float], label: str, style: str = "o-", **look: Any) -> None:
        axes.plot(panel["epsilons"], values, style, label=label, **{"markersize": 3.5, **look})

    unshuffled = "unshuffled, advanced composition (proven)"
    curve(panel["unshuffled"], unshuffled, "o--", color=MUTED)
    needed = "what ε needs, certified (proven)"
    curve(panel["certified"], needed, color=GREEN, markersize=4, linewidth=2.4)
    for clip, values in panel["shuffled"].items():
        estimate = f"shuffled, paper's estimate, c' = {in_clips(float(clip))} (heuristic)"
        curve(values, estimate, color=CLIP_COLOUR[clip])
    axes.set(xscale="log", yscale="log", ylim=(0.15, 80))
    axes.set_title(panel["setting"]["label"])
    axes.xaxis.set_major_locator(FixedLocator(panel["epsilons"]))
    axes.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)


def draw_map(raw: dict[str, Any]) -> Figure:
    """Logarithmic colour, every cell written out."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    values = np.array(raw["noise_multiplier"])
    norm = LogNorm(vmin=values.min(), vmax=values.max())
    image = axes.imshow(values, norm=norm, cmap="cividis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        colour = INK if norm(value) > 0.55 else "white"
        text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=8.5)
    axes.axvline(0.5, color="white", linewidth=3)
    powers = [f"$10^{{{len(str(d)) - 1}}}$" if d > 1 else "1" for d in raw["dimensions"]]
    axes.set_xticks(range(len(powers)), powers)
    axes.set_yticks(range(len(raw["epsilons"])), [f"{e:g}" for e in raw["epsilons"]])
    axes.set(xlabel="shuffled coordinates d  (d = 1: unshuffled)", ylabel="ε")
    clip = in_clips(raw["batch_clip"])
    label = raw["setting"]["label"]
    axes.set_title(f"Noise by the paper's estimate (heuristic), c' = {clip}, {label}")
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="noise multiplier σ", pad=0.02)
    return figure


FIGURES = (
    in_one_file(
        "fig3", CURVES, lambda scale: compute_curves(), show_curves, draw_curves, has_scales=False
    ),
    in_one_file("fig4", MAP, lambda scale: compute_map(), show_map, draw_map, has_scales=False),
)
