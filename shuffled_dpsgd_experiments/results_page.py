"""The tables of pages about sweeps, from the committed cells alone.

    python -m shuffled_dpsgd_experiments.results_page docs/results.md docs/ingredients.md

rewrites what stands between two marks, wherever a page has them. Between those of `grid NAME` is
the table of `results/NAME` and what tuning tried; between those of `ingredients NAME` also how far
each row is from the first, seed by seed. `sweeps/NAME.toml` says which methods there are and in
which order. Nothing between marks is typed by hand.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shuffled_dpsgd_experiments.sweeps import Sweep, load_sweep
from shuffled_dpsgd_experiments.sweeps.grid import describe_value
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.sweeps.table import TEXT_METRICS, grid_lines, ordered_rows

MARKED = re.compile(
    r"(<!-- (grid|ingredients) (\w+): begin -->).*?(<!-- \2 \3: end -->)", re.DOTALL
)
NOTHING = "No cell has been run yet."


def rewritten(page: str, root: Path) -> str:
    """The page with every marked table drawn anew from `root`/results and `root`/sweeps."""

    def table(found: re.Match[str]) -> str:
        begin, kind, name, end = found.groups()
        return f"{begin}\n\n{part_of(kind, name, root)}\n\n{end}"

    return MARKED.sub(table, page)


def part_of(kind: str, name: str, root: Path) -> str:
    """What belongs between two marks."""
    sweep = load_sweep(root / "sweeps" / f"{name}.toml", results=root / "results" / name)
    grid = grid_lines(sweep) if kind == "grid" else ingredient_lines(sweep)
    if len(grid) == 2:
        grid = [NOTHING]
    return "\n".join([*grid, *trial_lines(sweep)])


def ingredient_lines(sweep: Sweep) -> list[str]:
    """The grid with the difference to its first method, over the seeds that both have."""
    rows = ordered_rows(sweep)
    score = rows[0].score_name if rows else "score"
    metrics = [name for name in TEXT_METRICS if any(name in row.texts for row in rows)]
    heads = "".join(f" {TEXT_METRICS[name]} |" for name in metrics)
    lines = [
        f"| ε asked for | what | {score} | difference to the first |{heads} certified ε (proven) |",
        "|---" * (5 + len(metrics)) + "|",
    ]
    for row in rows:
        away = "" if row.variant else difference(sweep, row.method, row.epsilon)
        lines.append(
            f"| {row.describe_budget()} | {row.name} | {row.describe()} | {away} |"
            f"{row.describe_texts(metrics)} {row.describe_certified()} |"
        )
    return lines


def difference(sweep: Sweep, method: str, epsilon: float | None) -> str:
    """Mean ± standard deviation of the differences to the sweep's first method, seed by seed."""
    scores: dict[str, dict[int, float]] = {}
    name = ""
    for record in read_records(sweep.results):
        if record["epsilon"] == epsilon and record["score"] is not None:
            scores.setdefault(record["method"], {})[record["seed"]] = float(record["score"])
            name = record["score_name"]
    base, mine = scores.get(sweep.methods[0].name, {}), scores.get(method, {})
    scale, digits = (100.0, 1) if name == "accuracy" else (1.0, 2)
    found = [scale * (mine[seed] - base[seed]) for seed in sorted(base.keys() & mine.keys())]
    if not found or method == sweep.methods[0].name:
        return ""
    spread = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):+.{digits}f}{spread}".replace("-", "−")


def trial_lines(sweep: Sweep) -> list[str]:
    """A row for each method: what was tried, with its score; what the grid was run with in bold."""
    trials, grid = read_records(sweep.results, "tuning"), read_records(sweep.results)
    if not trials:
        return []
    names = ", ".join(key.split(".")[-1].replace("_", " ") for key in trials[0]["tuned"])
    title = f"{names}: {trials[0]['score_name']} on records held back"
    lines = ["", f"| method | {title} |", "|---|---|"]
    for method in sweep.methods:
        mine = [record for record in trials if record["method"] == method.name]
        mine.sort(key=lambda record: tuple(record["tuned"].values()))
        chosen = [record["tuned"] for record in grid if record["method"] == method.name]
        told = "; ".join(_describe(record, record["tuned"] in chosen) for record in mine)
        lines += [f"| {method.name} | {told} |"] if mine else []
    return lines


def _describe(record: dict[str, Any], chosen: bool) -> str:
    values = ", ".join(describe_value(value) for value in record["tuned"].values())
    scale, digits = (100.0, 1) if record["score_name"] == "accuracy" else (1.0, 2)
    score = "none" if record["score"] is None else f"{scale * record['score']:.{digits}f}"
    text = f"{values}: {score}"
    return f"**{text}**" if chosen else text


def main(arguments: Sequence[str]) -> None:
    for name in arguments:
        page = Path(name)
        text = rewritten(page.read_text(encoding="utf-8"), page.resolve().parents[1])
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
