"""The runs behind the verdicts of `advise`: the embedded digits at five budgets.

`python -m shuffled_dpsgd_experiments.advice_runs results/advice_digits.json` trains them, some ten
minutes on a core, and prints the table of docs/advice.md. With `results/linear_digits.json
recipe/digits-linear` it trains the linear model that the table compares with.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.reports import MetricsLog
from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.recipes import RECIPES
from shuffled_dpsgd.tasks.run import execute, prepare
from shuffled_dpsgd.training.prospect import prospect_of
from shuffled_dpsgd_experiments.provenance import Provenance, code, data_digest

EPSILONS = (0.1, 0.3, 1.0, 3.0, 8.0)
SEEDS = range(5)
HEADER = """\
| certified ε (proven) | noise multiplier | bound over the run | measured over the run \
| held-out accuracy | verdict of `advise` |
|---|---|---|---|---|---|"""


def train_at(epsilon: float, recipe: str, seed: int) -> dict[str, Any]:
    """One run of a recipe at a budget: what was predicted of it, what it did, what made it."""
    settings = RECIPES[recipe].to_run() | {"seed": seed}
    settings["privacy"]["epsilon"] = epsilon
    config = parse_config(settings)
    with TemporaryDirectory() as name:
        run = prepare(config, Path(name) / "run")
        now = prospect_of(run.private.plan)
        made = Provenance(run.private.model, data_digest(run.task.train_data))
        summary = execute(run).summary
        records = MetricsLog(run.directory / "metrics.jsonl").read()
    ratios = [r.signal_to_noise for r in records if r.signal_to_noise is not None]
    return {
        "epsilon": summary["privacy_card"]["certified"]["epsilon"],
        "kind": "proven",
        "target": epsilon,
        "seed": seed,
        "delta": config.privacy.delta,
        "dataset_size": now.dataset_size,
        "dimension": now.dimension,
        **now.to_json(),
        "measured_over_run": math.sqrt(now.num_steps) * sum(ratios) / len(ratios),
        "heldout_accuracy": summary["heldout_score"],
        "warnings": [warning["kind"] for warning in summary["warnings"]],
        **made.to_json(record.loss for record in records),
    }


def by_target(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The runs of each budget as one: what was measured is a mean over seeds."""
    found: dict[float, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["target"], []).append(run)
    names = ("measured_over_run", "heldout_accuracy")
    return [
        {**alike[0], **{name: fmean(run[name] for run in alike) for name in names}}
        | {"spread": stdev(run["heldout_accuracy"] for run in alike)}
        for alike in found.values()
    ]


def table_of(runs: Iterable[Mapping[str, Any]]) -> str:
    """The runs as docs/advice.md shows them."""
    lines = [
        f"| {row['target']:g} | {row['noise_multiplier']:.3g} | "
        f"{row['signal_to_noise_over_run']:.3g} | {row['measured_over_run']:.2g} | "
        f"{row['heldout_accuracy']:.3f} ± {row['spread']:.3f} | {row['verdict']} |"
        for row in by_target(runs)
    ]
    return "\n".join([HEADER, *lines])


def main(path: Path, recipe: str = "recipe/digits") -> None:
    """Train all of them, write the results with their origin, print the table."""
    rows = [train_at(epsilon, recipe, seed) for epsilon in EPSILONS for seed in SEEDS]
    found = {"runs": rows, "environment": environment() | code()}
    path.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(table_of(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
