"""What the paper says of its figures, beside the numbers that were drawn here.

A figure prints few numbers. Each row takes one that the paper's text or caption states, or one
observation it makes, and holds it against the figure's JSON. The certified ε is that of the noise
in the row, computed when the row is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from shuffled_dpsgd.accounting import certified_bracket
from shuffled_dpsgd_experiments.figures.fig2 import LABEL
from shuffled_dpsgd_experiments.figures.settings import SIX, Setting
from shuffled_dpsgd_experiments.tables.exhibit import Exhibit, ExhibitRow

_SETTINGS = {setting.label: setting for setting in SIX}
_SHARES = (0.05, 0.07)
"""The paper: at ε = 0.25 shuffled noise is merely 5 to 7 % of unshuffled noise."""
_FIG2_TEXT = {
    "fenton-wilkinson": "sufficiently close to the ground truth",
    "schwartz-yeh": "poor at lower values",
    "least-squares": "better than Fenton–Wilkinson",
    "kernel-density": "better than Fenton–Wilkinson",
}


def exhibit_of(name: str, title: str, raw: Mapping[str, Any]) -> Exhibit:
    """The rows of one figure, from its JSON."""
    rows, notes = {"fig1": _fig1, "fig2": _fig2, "fig3": _fig3, "fig4": _fig4}[name](raw)
    return Exhibit(
        name=name,
        title=f"Figure {name.removeprefix('fig')}: {title[0].lower()}{title[1:]}",
        origin=f"Computed on {raw['environment']['date']}; no training is needed.",
        rows=tuple(rows),
        notes=notes,
    )


def _fig1(raw: Mapping[str, Any]) -> tuple[list[ExhibitRow], tuple[str, ...]]:
    points = raw["grid_points"]
    rows = [
        ExhibitRow(
            what=f"distance of the two laws on a grid, {panel['label']}",
            paper=f"{printed:g}",
            ours=f"{panel['frobenius']:.2f} on {points:,} × {points:,} points; exact L2 norm "
            f"{panel['exact_l2']:.4f}; total variation {panel['total_variation']:.4f}",
            verdict=_agrees(printed, panel["frobenius"]),
        )
        for printed, panel in zip(raw["paper_frobenius"], raw["panels"], strict=True)
    ]
    note = (
        "The paper does not state its grid, on which the norm depends. Total variation says how "
        "well the two can be told apart: the shuffle lowers it, and leaves it high."
    )
    return rows, (note,)


def _agrees(printed: float, found: float) -> str:
    if abs(found - printed) < 0.005:
        return "as printed"
    return f"differs by {found / printed - 1:+.1%}; the two norms stand at √2 to 1 on any fine grid"


def _fig2(raw: Mapping[str, Any]) -> tuple[list[ExhibitRow], tuple[str, ...]]:
    distances = {name: raw["kolmogorov"][name] for name in _FIG2_TEXT}
    worst = max(distances, key=lambda name: distances[name])
    rows = [
        ExhibitRow(
            what=LABEL[name],
            paper=_FIG2_TEXT[name],
            ours=f"off by {distance:.2f} in cumulative probability, at most",
            verdict="the farthest of the four from the truth" if name == worst else "",
        )
        for name, distance in distances.items()
    ]
    exponent = round(math.log10(raw["dimension"]))
    note = (
        f"The sum of 10^{exponent} log-normals whose logarithms have standard deviation "
        f"{raw['std']:g}, as in the theorem; truth from {raw['truth_draws']:,} exact draws."
    )
    return rows, (note,)


def _fig3(raw: Mapping[str, Any]) -> tuple[list[ExhibitRow], tuple[str, ...]]:
    rows = []
    for panel in raw["panels"]:
        setting, epsilon = _SETTINGS[panel["setting"]["label"]], panel["epsilons"][0]
        shares = {clip: values[0] for clip, values in panel["shuffled_over_unshuffled"].items()}
        widest = max(shares, key=float)
        inside = [clip for clip, share in shares.items() if _SHARES[0] <= share <= _SHARES[1]]
        certified = _certified(setting, panel["shuffled"][widest][0])
        where = f"at c' = {_clip(inside[0])}" if inside else "at none of the three c'"
        rows.append(
            ExhibitRow(
                what=f"{setting.label}: shuffled over unshuffled noise at ε = {epsilon:g}",
                paper=f"{100 * _SHARES[0]:g} to {100 * _SHARES[1]:g} %",
                ours="; ".join(f"{share:.1%} at c' = {_clip(c)}" for c, share in shares.items()),
                certified=f"{certified:.3g} at c' = {_clip(widest)}",
                verdict=f"as printed {where}; ε = {epsilon:g} is " + _standing(certified, epsilon),
            )
        )
    note = "The paper does not state c'. A smaller c' needs less noise, and less is proven of it."
    return rows, (note,)


def _fig4(raw: Mapping[str, Any]) -> tuple[list[ExhibitRow], tuple[str, ...]]:
    setting, last = _SETTINGS[raw["setting"]["label"]], raw["dimensions"][-1]
    rows = []
    for place in (0, -1):
        epsilon, noise = raw["epsilons"][place], raw["noise_multiplier"][place]
        certified = _certified(setting, noise[-1])
        rows.append(
            ExhibitRow(
                what=f"σ at ε = {epsilon:g}, from d = 1 to d = 10^{round(math.log10(last))}",
                paper="drops drastically; ε barely matters any more",
                ours=f"{noise[0]:.3g} → {noise[-1]:.3g}",
                certified=f"{certified:.3g}",
                verdict=f"{'as described' if noise[-1] < noise[0] / 2 else 'does not drop much'}; "
                f"ε = {epsilon:g} is {_standing(certified, epsilon)} of that noise",
            )
        )
    clip = _clip(f"{raw['batch_clip']:g}")
    return rows, (f"{setting.label}, c' = {clip}; the paper names neither.",)


def _standing(certified: float, epsilon: float) -> str:
    return "proven" if certified <= epsilon else "claimed, not proven"


def _certified(setting: Setting, noise_multiplier: float) -> float:
    return _priced(noise_multiplier, setting.sampling_prob, setting.num_steps, setting.delta)


@cache
def _priced(noise_multiplier: float, sampling_prob: float, num_steps: int, delta: float) -> float:
    return certified_bracket(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        delta=delta,
    ).upper


def _clip(ratio: str) -> str:
    return "c" if ratio == "1" else f"{ratio}c"
