"""The tables of documents about sweeps and recipes, from the committed records alone.

    python -m shuffled_dpsgd_experiments.pages docs/{results,parts,ingredients,recipes}.md

rewrites what stands between two marks, wherever a page has them: `grid NAME` is the table of
`results/NAME`, `ingredients NAME` also has how far each row is from the first, seed by seed, and
`paired WORKLOAD` is the same for a workload of the frontier, `recipes all` what recipes reached,
`effort all` how far tuning and seeds went. `sweeps/NAME.toml` says which methods there are and in
which order. Nothing between marks is typed by hand.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from shuffled_dpsgd.tasks.recipes import RECIPES, Recipe
from shuffled_dpsgd_experiments.frontier.cells import point_of
from shuffled_dpsgd_experiments.frontier.curves import SPLIT
from shuffled_dpsgd_experiments.frontier.running import cells_of
from shuffled_dpsgd_experiments.frontier.workloads import (
    INGREDIENTS,
    LESS_NOISE,
    OPACUS,
    OURS,
    WORKLOADS,
    Workload,
)
from shuffled_dpsgd_experiments.sweeps import Sweep, load_sweep
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.sweeps.table import (
    SweepRow,
    in_units,
    line_of,
    ordered_rows,
    rows_of,
    three_digits,
)

MARKED = re.compile(
    r"(<!-- (grid|ingredients|paired|recipes|effort) ([\w-]+): begin -->).*?(<!-- \2 \3: end -->)",
    re.DOTALL,
)
# The workload of the frontier, its held-out set and what it is, by the sweep it stands under.
FLOORS = {
    "cifar100": ("cifar100-linear", "test", "certified logistic regression on pixels"),
    "sst2": ("sst2-linear", "dev", "certified logistic regression on frozen MiniLM features"),
    "recipe_digits": ("digits-linear", "test", "certified logistic regression on pixels"),
    "opacus_digits": ("digits-linear", "test", "certified logistic regression on pixels"),
    "paper_digits": ("digits-linear", "test", "certified logistic regression on pixels"),
}
NAMED = {
    OPACUS: "Opacus' defaults: noise by RDP, constant rate",
    LESS_NOISE: "noise by PLD",
    OURS: "noise by PLD, cosine schedule",
}
NOTHING = "No cell has been run yet."
_FIRST_PROVEN = "\nThe first row's certified ε (proven) is {}."


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
    if kind == "paired":
        return "\n".join(paired_lines(WORKLOADS[name], root))
    if kind == "effort":
        return "\n".join(effort_lines(root))
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
        lines.append(_FIRST_PROVEN.format(" and ".join(proven)))
    return lines


def floor_lines(sweep: Sweep, epsilons: Sequence[float], *, paired: bool) -> list[str]:
    """Logistic regression by DP-SGD on the same held-out records, from the frontier's runs."""
    if sweep.name not in FLOORS:
        return []
    workload, split, what = FLOORS[sweep.name]
    scores: dict[float, list[float]] = {}
    for record in cells_of(WORKLOADS[workload], sweep.results.parent).read():
        if record["stage"] == "figure":
            scores.setdefault(record["epsilon"], []).append(record["accuracy"][split])
    if not scores:
        return []
    cells = [_over_seeds(scores[each]) if each in scores else "" for each in epsilons]
    if paired:
        cells = [part for cell in cells for part in (cell, "")]
    return [line_of([what, *cells])]


def _over_seeds(found: Sequence[float]) -> str:
    """Mean ± standard deviation of accuracies in per cent, and their number."""
    mean, spread = 100 * statistics.fmean(found), 100 * statistics.stdev(found)
    return f"{mean:.1f} ± {spread:.1f} ({len(found)})"


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
    """The differences to the sweep's first method, seed by seed."""
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
    return with_interval(name, found)


def with_interval(score_name: str, found: Sequence[float]) -> str:
    """The mean of differences, with Student's interval of 95 % where there are two or more.

    >>> with_interval("accuracy", [0.01, 0.02, 0.03]), with_interval("accuracy", [-0.01])
    ('+2.0 ± 2.5', '−1.0')
    """
    mean, half = in_units(score_name, statistics.fmean(found), "+"), ""
    if len(found) > 1:
        error = statistics.stdev(found) / len(found) ** 0.5
        half = f" ± {in_units(score_name, student.ppf(0.975, len(found) - 1) * error)}"
    return f"{mean}{half}".replace("-", "−")


def paired_lines(workload: Workload, root: Path) -> list[str]:
    """Ingredients of DP-SGD on a workload of the frontier, over the seeds that Opacus' has too."""
    scores: dict[str, dict[int, float]] = {each: {} for each in INGREDIENTS}
    proven: dict[str, float] = {}
    for record in cells_of(workload, root / "results").read():
        point = point_of(record)
        at = point.epsilon == workload.ingredients_at and not point.is_paper
        if at and record["stage"] == "figure":
            scores[point.ingredients][record["seed"]] = record["accuracy"][SPLIT]
            proven[point.ingredients] = record["certified_epsilon"]
    first = scores[OPACUS]
    lines = [
        f"| what | accuracy, ε = {workload.ingredients_at:g} | to the first |",
        "|---" * 3 + "|",
    ]
    for name, mine in scores.items():
        found = [mine[seed] - first[seed] for seed in sorted(mine.keys() & first.keys())]
        if len(found) < 2:
            return [NOTHING]
        apart = "" if name == OPACUS else with_interval("accuracy", found)
        lines.append(line_of([NAMED[name], _over_seeds([*mine.values()]), apart]))
    return [*lines, _FIRST_PROVEN.format(f"{proven[OPACUS]:.3g}")]


def recipe_lines(root: Path) -> list[str]:
    """What committed runs with the settings of recipes reached, by the ε asked for."""
    lines = ["| recipe | δ | accuracy at certified ε (proven) | records |", "|---" * 4 + "|"]
    for recipe in RECIPES.values():
        found = scores_of(recipe, root)
        alike = len({len(scores) for scores in found.values()}) == 1
        reached = [
            f"{epsilon:g}: {statistics.fmean(scores):.3f}"
            + ("" if alike or len(scores) == 1 else f" ({len(scores)} runs)")
            for epsilon, scores in found.items()
        ]
        reached += [f"{len(scores)} runs each" for scores in [*found.values()][:1] if alike]
        delta = three_digits(recipe.run["privacy"]["delta"])
        link = f"[records](../{recipe.results})"
        lines.append(line_of([f"`{recipe.name}`", delta, "; ".join(reached), link]))
    return lines


def effort_lines(root: Path) -> list[str]:
    """Of every sweep and of the frontier: rates that lie at an end of what was tried, and seeds.

    A sweep that tuned nothing and has no row of one seed is in the sum alone.
    """
    lines = ["| records | best rate at an end of its grid | rows of one seed |", "|---" * 3 + "|"]
    sums = [0, 0, 0, 0]
    for path in sorted((root / "sweeps").glob("*.toml")):
        records = root / "results" / path.stem
        runs = read_records(records)
        seeds = [len(row.scores) for row in rows_of(runs)]
        rates = tuned_rates_of(read_records(records, "tuning"), runs)
        if seeds:
            ends = sum(best in (min(tried), max(tried)) for best, tried in rates)
            found = [ends, len(rates), seeds.count(1), len(seeds)]
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            lines += [_effort(path.stem, found)] if rates or 1 in seeds else []
    frontier = json.loads((root / "results" / "frontier.json").read_text(encoding="utf-8"))
    points = []
    for each in frontier["workloads"].values():
        points += [*each["points"], *(each["floor"] or {"points": []})["points"]]
    ends = sum(point["at_the_edge"] for point in points)
    single = sum(point["num_seeds"] == 1 for point in points)
    lines.append(_effort("all sweeps", sums))
    return [*lines, _effort("frontier", [ends, len(points), single, len(points)])]


def tuned_rates_of(
    trials: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> list[tuple[float, list[float]]]:
    """The learning rate that the runs of every method took, and all that were tried for it."""
    key, tried = "optimizer.learning_rate", dict[str, list[float]]()
    for record in trials:
        if key in record["tuned"]:
            tried.setdefault(record["method"], []).append(record["tuned"][key])
    taken = {record["method"]: record["tuned"].get(key) for record in runs}
    return [(taken[method], rates) for method, rates in tried.items() if method in taken]


def _effort(name: str, found: Sequence[int]) -> str:
    return line_of([name, f"{found[0]}/{found[1]}", f"{found[2]}/{found[3]}"])


def scores_of(recipe: Recipe, root: Path) -> dict[float, list[float]]:
    """Held-out accuracies by the ε asked for, of the committed runs with a recipe's settings."""
    path, found = root / recipe.results, dict[float, list[float]]()
    if path.is_file():
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            found.setdefault(run["target"], []).append(run["heldout_accuracy"])
        return found
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
