"""The runs behind the verdicts of `advise`: the embedded digits at five budgets.

`python -m shuffled_dpsgd_experiments.advice_runs results/advice_digits.json` trains them, some two
minutes on two cores, and prints the table of docs/advice.md. With `results/linear_digits.json
recipe/digits-linear` it trains the linear model that the table compares with.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.reports import MetricsLog
from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.recipes import RECIPES
from shuffled_dpsgd.tasks.run import execute, prepare
from shuffled_dpsgd.training.prospect import prospect_of

EPSILONS = (0.1, 0.3, 1.0, 3.0, 8.0)
HEADER = """\
| certified ε (proven) | noise multiplier | bound over the run | measured over the run \
| held-out accuracy | verdict of `advise` |
|---|---|---|---|---|---|"""


def train_at(epsilon: float, recipe: str) -> dict[str, Any]:
    """One run of a recipe at a budget: what was predicted of it, and what it did."""
    settings = RECIPES[recipe].to_run()
    settings["privacy"]["epsilon"] = epsilon
    config = parse_config(settings)
    with TemporaryDirectory() as name:
        run = prepare(config, Path(name) / "run")
        now = prospect_of(run.private.plan)
        summary = execute(run).summary
        records = MetricsLog(run.directory / "metrics.jsonl").read()
    ratios = [r.signal_to_noise for r in records if r.signal_to_noise is not None]
    return {
        "epsilon": summary["privacy_card"]["certified"]["epsilon"],
        "kind": "proven",
        "target": epsilon,
        "delta": config.privacy.delta,
        "dataset_size": now.dataset_size,
        "dimension": now.dimension,
        **now.to_json(),
        "measured_over_run": math.sqrt(now.num_steps) * sum(ratios) / len(ratios),
        "heldout_accuracy": summary["heldout_score"],
        "warnings": [warning["kind"] for warning in summary["warnings"]],
    }


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as docs/advice.md shows them."""
    return "\n".join(
        [
            HEADER,
            *(
                f"| {row['target']:g} | {row['noise_multiplier']:.3g} | "
                f"{row['signal_to_noise_over_run']:.3g} | {row['measured_over_run']:.2g} | "
                f"{row['heldout_accuracy']:.3f} | {row['verdict']} |"
                for row in rows
            ),
        ]
    )


def main(path: Path, recipe: str = "recipe/digits") -> None:
    """Train all of them, write the results with their origin, print the table."""
    rows = [train_at(epsilon, recipe) for epsilon in EPSILONS]
    found = {"runs": rows, "environment": environment()}
    path.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(table_of(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
