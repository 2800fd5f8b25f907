"""The page of recipes: what committed runs with their settings reached."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from shuffled_dpsgd.tasks.recipes import RECIPES, Recipe

HEADER = """\
| recipe | certified ε (proven) | δ | held-out accuracy | runs | records |
|---|---|---|---|---|---|"""


def scores_of(recipe: Recipe, root: Path) -> dict[float, list[float]]:
    """Held-out accuracies by the ε asked for, of the committed runs with a recipe's settings."""
    path = root / recipe.results
    if path.is_file():
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {run["target"]: [run["heldout_accuracy"]] for run in runs}
    found: dict[float, list[float]] = {}
    for file in sorted(path.glob("main_shuffled-certified_*.json")):
        cell = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(cell["epsilon"], []).append(cell["score"])
    return dict(sorted(found.items()))


def table_of(root: Path) -> str:
    """The table of docs/recipes.md, from the records under `root`."""
    rows = [
        f"| `{recipe.name}` | {epsilon:g} | {recipe.run['privacy']['delta']:.3g} | "
        f"{mean(scores):.3f} | {len(scores)} | [records](../{recipe.results}) |"
        for recipe in RECIPES.values()
        for epsilon, scores in scores_of(recipe, root).items()
    ]
    return "\n".join([HEADER, *rows])
