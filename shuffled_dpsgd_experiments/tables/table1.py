"""Table 1: the thirteen settings, with what the paper leaves out: steps, noise, and what it proves.

Computed from the models' shapes; no weights and no data are needed at any scale.
"""

from __future__ import annotations

from typing import Any

from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.advice import preview_shapes
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, in_one_file, origin_of
from shuffled_dpsgd_experiments.presets import PRESETS, Preset

TITLE = "Table 1: settings"
EPSILON = 1.0
DEMO = ("paper/vit-cifar100", "paper/bert-sst2", "paper/roberta-sst2", "paper/gpt2-e2e")


def run(scale: str) -> dict[str, Any]:
    """Every preset's plan at ε = 1 and c' = c; at `demo` one data set for each smaller model."""
    names = DEMO if scale == "demo" else tuple(PRESETS)
    return {
        "scale": scale,
        "rows": [_row(PRESETS[name]) for name in names],
    }


def _row(preset: Preset) -> dict[str, Any]:
    raw = preset.to_run()
    raw["privacy"]["epsilon"] = EPSILON
    found = preview_shapes(
        parse_config(raw),
        model=preset.model,
        dataset_size=preset.dataset_size,
        num_labels=preset.num_labels,
    )
    return {"preset": preset.name, **found.to_json()}


def show(raw: dict[str, Any]) -> Exhibit:
    """Printed settings beside what they amount to."""
    return Exhibit(
        name="table1",
        title=TITLE,
        origin=origin_of(raw),
        rows=tuple(_shown(row) for row in raw["rows"]),
        notes=(
            f"Noise and certified ε are those of the paper's formula at ε = {EPSILON:g} "
            "(heuristic) and c' = c, which its text implies.",
            "The printed shuffle ratio of 100 % counts weights that no permutation of Theorems 1 "
            "and 2 moves: embeddings, norms and heads.",
        ),
    )


def _shown(row: dict[str, Any]) -> ExhibitRow:
    preset = PRESETS[row["preset"]]
    block = row["blocks"]["shuffled"]
    ratio = block["dimension"] / row["total_parameters"]
    sizes = preset.dimension / 1e6, row["total_parameters"] / 1e6
    differs = abs(sizes[0] / sizes[1] - 1) > 0.02
    return ExhibitRow(
        what=preset.label,
        paper=f"{sizes[0]:g}M, shuffled 100 %, N = {preset.dataset_size:,}, learning rate "
        f"{preset.learning_rate:g}, {preset.epochs} epochs, δ = {preset.delta:.3g}",
        ours=f"{sizes[1]:.1f}M, shuffled {ratio:.0%}, {row['num_steps']:,} steps, "
        f"σ = {block['noise_multiplier']:.3f}, "
        f"σ0 = {row['blocks']['rest']['noise_multiplier']:.2f}",
        certified=f"{row['certified']['epsilon']:.3g}",
        verdict=f"claims ε = {EPSILON:g}, which this noise does not give; {ratio:.0%} of the "
        "weights move, not 100 %"
        + (f"; the model has {sizes[1]:.0f}M parameters, not {sizes[0]:.0f}M" if differs else ""),
    )


TABLE = in_one_file("table1", TITLE, run, show)
