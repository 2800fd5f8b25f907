"""Figure 4: the paper's noise over ε and dimension, as a heat map; the column d = 1 is unshuffled.

ViT on CIFAR-100, c' = c (the paper names neither; its text implies the latter).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.accounting import calibrate_paper
from shuffled_dpsgd.reports.style import INK
from shuffled_dpsgd_experiments.figures.output import FigureRecipe
from shuffled_dpsgd_experiments.figures.settings import VIT, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
DIMENSIONS = (1, 10**2, 10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
BATCH_CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """`noise_multiplier[i][j]` at `epsilons[i]` and `dimensions[j]`. Heuristic for d > 1."""

    setting: Setting
    batch_clip: float
    epsilons: tuple[float, ...]
    dimensions: tuple[int, ...]
    noise_multiplier: tuple[tuple[float, ...], ...]


def compute(batch_clip: float = BATCH_CLIP) -> HeatMap:
    """σ by the paper's route at every cell."""

    def cell(epsilon: float, dimension: int) -> float:
        return calibrate_paper(
            epsilon=epsilon,
            delta=VIT.delta,
            sampling_prob=VIT.sampling_prob,
            num_steps=VIT.num_steps,
            dimension=dimension,
            batch_clip=batch_clip,
        ).noise_multiplier

    return HeatMap(
        setting=VIT,
        batch_clip=batch_clip,
        epsilons=EPSILONS,
        dimensions=DIMENSIONS,
        noise_multiplier=tuple(tuple(cell(e, d) for d in DIMENSIONS) for e in EPSILONS),
    )


def draw(heat_map: HeatMap) -> Figure:
    """Logarithmic colour, every cell written out."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    values = np.array(heat_map.noise_multiplier)
    norm = LogNorm(vmin=values.min(), vmax=values.max())
    image = axes.imshow(values, norm=norm, cmap="cividis", aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            colour = INK if norm(value) > 0.55 else "white"
            text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=8.5)
    axes.axvline(0.5, color="white", linewidth=3)
    axes.set_xticks(range(len(heat_map.dimensions)), [_power(d) for d in heat_map.dimensions])
    axes.set_yticks(range(len(heat_map.epsilons)), [f"{e:g}" for e in heat_map.epsilons])
    axes.set(xlabel="shuffled coordinates d  (d = 1: unshuffled)", ylabel="ε")
    clip = "c" if heat_map.batch_clip == 1.0 else f"{heat_map.batch_clip:g}c"
    axes.set_title(
        f"Noise by the paper's estimate (heuristic), c' = {clip}, {heat_map.setting.label}"
    )
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="noise multiplier σ", pad=0.02)
    return figure


def to_json(heat_map: HeatMap) -> dict[str, Any]:
    """Everything drawn."""
    return {"kind": "heuristic", **asdict(heat_map)}


def _power(dimension: int) -> str:
    exponent = len(str(dimension)) - 1
    return "1" if exponent == 0 else f"$10^{{{exponent}}}$"


RECIPE = FigureRecipe(
    name="fig4",
    title="The paper's noise over ε and dimension",
    compute=compute,
    draw=draw,
    to_json=to_json,
)
