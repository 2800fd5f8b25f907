"""The tables of documents about sweeps and recipes, from the committed records alone.

    python -m shuffled_dpsgd_experiments.pages docs/{results,parts,ingredients,recipes}.md

rewrites what stands between two marks, wherever a page has them: `grid NAME` is the table of
`results/NAME`, `ingredients NAME` also has how far each row is from the first, seed by seed, and
`recipes all` is what recipes reached. `sweeps/NAME.toml` says which methods there are and in which
order. Nothing between marks is typed by hand.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd.tasks.recipes import RECIPES, Recipe
from shuffled_dpsgd_experiments.frontier.cells import CellFile
from shuffled_dpsgd_experiments.sweeps import Sweep, load_sweep
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.sweeps.table import (
    SweepRow,
    in_units,
    line_of,
    ordered_rows,
    three_digits,
)

MARKED = re.compile(
    r"(<!-- (grid|ingredients|recipes) (\w+): begin -->).*?(<!-- \2 \3: end -->)", re.DOTALL
)
# The workload of the frontier, its held-out set and what it is, by the sweep it stands under.
FLOORS = {
    "sst2": ("sst2-linear", "dev", "certified logistic regression on frozen MiniLM features"),
    "recipe_digits": ("digits-linear", "test", "certified logistic regression on pixels"),
    "opacus_digits": ("digits-linear", "test", "certified logistic regression on pixels"),
}
NOTHING = "No cell has been run yet."


def rewritten(page: str, root: Path) -> str:
    """The page with every marked table drawn anew from `root`/results and `root`/sweeps."""

    def table(found: re.Match[str]) -> str:
        begin, kind, name, end = found.groups()
        return f"{begin}\n\n{part_of(kind, name, root)}\n\n{end}"

    return MARKED.sub(table, page)


def part_of(kind: str, name: str, root: Path) -> str:
    """What belongs between two marks."""
    if kind == "recipes":
        return "\n".join(recipe_lines(root))
    sweep = load_sweep(root / "sweeps" / f"{name}.toml", results=root / "results" / name)
    rows = ordered_rows(sweep)
    if not rows:
        return NOTHING
    lines = grid_lines(sweep, rows, paired=kind == "ingredients")
    counts = {len(row.scores) for row in rows}
    return "\n".join([*lines, *(f"\n{n} seeds each." for n in counts if counts == {n} != {1})])


def grid_lines(sweep: Sweep, rows: Sequence[SweepRow], *, paired: bool) -> list[str]:
    """Methods by budgets, a floor where one was run, and what is proven where it is not ε.

    With `paired` each cell has the difference to the first method beside it, over the seeds that
    both have.
    """
    epsilons, score = sorted(sweep.epsilons), score_of(rows)
    rows_at = {(row.method, row.epsilon): row for row in rows if not row.variant}
    asked = {
        m.name: [rows_at.get((m.name, epsilon)) for epsilon in epsilons] for m in sweep.methods
    }
    there = {name: mine for name, mine in asked.items() if any(mine)}
    plain = [row for row in rows if row.epsilon is None]
    lines = [] if paired else [f"Non-private: {shown(row, rows)}.\n" for row in plain]
    if paired:
        heads = ["what", *(h for e in epsilons for h in (f"{score}, ε = {e:g}", "to the first"))]
    else:
        heads = [f"{score} at ε =", *(f"{epsilon:g}" for epsilon in epsilons)]
    lines += [line_of(heads), "|---" * len(heads) + "|"]
    for name, mine in there.items():
        cells = [name]
        for epsilon, row in zip(epsilons, mine, strict=True):
            cells.append("" if row is None else shown(row, rows))
            cells += [difference(sweep, name, epsilon)] if paired else []
        lines.append(line_of(cells))
    lines += floor_lines(sweep, epsilons, paired=paired)
    off = {
        name: ["" if row is None else row.describe_certified() for row in mine]
        for name, mine in there.items()
        if any(row is not None and not meets_its_budget(row) for row in mine)
    }
    if not paired:
        return lines + [line_of([f"proven ε of {name}", *proven]) for name, proven in off.items()]
    if proven := off.get(sweep.methods[0].name):
        lines.append(
            f"\nThe first row's certified ε (proven) is {' and '.join(proven)}, that of the others "
            "what was asked for."
        )
    return lines


def floor_lines(sweep: Sweep, epsilons: Sequence[float], *, paired: bool) -> list[str]:
    """Logistic regression by DP-SGD on the same held-out records, from the frontier's runs."""
    if sweep.name not in FLOORS:
        return []
    workload, split, what = FLOORS[sweep.name]
    scores: dict[float, list[float]] = {}
    for record in CellFile(sweep.results.parent / "frontier" / f"{workload}.jsonl").read():
        if record["stage"] == "figure":
            scores.setdefault(record["epsilon"], []).append(record["accuracy"][split])
    cells = [what]
    for found in map(scores.get, epsilons):
        if found is None:
            cells.append("")
        else:
            mean, spread = statistics.fmean(found), statistics.stdev(found)
            cells.append(f"{100 * mean:.1f} ± {100 * spread:.1f} ({len(found)})")
        cells += [""] if paired else []
    return [line_of(cells)]


def score_of(rows: Sequence[SweepRow]) -> str:
    """What the cells hold."""
    return rows[0].score_name + ("; BLEU" if any("bleu" in row.texts for row in rows) else "")


def shown(row: SweepRow, rows: Sequence[SweepRow]) -> str:
    """Mean and spread over seeds, their number if it is not the same in all rows, and BLEU."""
    differs = len({len(other.scores) for other in rows}) > 1
    count = f" ({len(row.scores)})" if differs and len(row.scores) > 1 else ""
    bleu = f"; {row.texts['bleu']:.3g}" if "bleu" in row.texts else ""
    return f"{row.describe_score()}{count}{bleu}"


def meets_its_budget(row: SweepRow) -> bool:
    """Whether what is proven is what was asked for, to two percent."""
    if row.certified is None or row.epsilon is None:
        return False
    return abs(row.certified / row.epsilon - 1.0) < 0.02


def difference(sweep: Sweep, method: str, epsilon: float | None) -> str:
    """Mean ± standard deviation of the differences to the sweep's first method, seed by seed."""
    scores: dict[str, dict[int, float]] = {}
    name = ""
    for record in read_records(sweep.results):
        if record["epsilon"] == epsilon and record["score"] is not None:
            scores.setdefault(record["method"], {})[record["seed"]] = float(record["score"])
            name = record["score_name"]
    base, mine = scores.get(sweep.methods[0].name, {}), scores.get(method, {})
    found = [mine[seed] - base[seed] for seed in sorted(base.keys() & mine.keys())]
    if not found or method == sweep.methods[0].name:
        return ""
    spread = f" ± {in_units(name, statistics.stdev(found))}" if len(found) > 1 else ""
    return f"{in_units(name, statistics.fmean(found), '+')}{spread}".replace("-", "−")


def recipe_lines(root: Path) -> list[str]:
    """What committed runs with the settings of recipes reached, by the ε asked for."""
    lines = ["| recipe | δ | accuracy at certified ε (proven) | records |", "|---" * 4 + "|"]
    for recipe in RECIPES.values():
        reached = [
            f"{epsilon:g}: {statistics.fmean(scores):.3f}"
            + (f" ({len(scores)} runs)" if len(scores) > 1 else "")
            for epsilon, scores in scores_of(recipe, root).items()
        ]
        delta = three_digits(recipe.run["privacy"]["delta"])
        link = f"[records](../{recipe.results})"
        lines.append(line_of([f"`{recipe.name}`", delta, "; ".join(reached), link]))
    return lines


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


def main(arguments: Sequence[str]) -> None:
    for name in arguments:
        page = Path(name)
        text = rewritten(page.read_text(encoding="utf-8"), page.resolve().parents[1])
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
