"""How often planted mixing is found in time, whether healthy runs are stopped, and what it costs.

Run as a script, in parts: `python checks_report.py FILE planted 100`, `... FILE healthy 10000` and
`... FILE cost 2000`. What is known of a part is in the file after every round of it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.training import make_private
from training import healthy_zoo, planted_mixing

COMMAND = "python tests/training/checks_report.py results/checks.json {part} {size}"
# The steps of a run of each model of the zoo: several short runs, because most is looked at first.
STEPS_OF_A_RUN = 100


def planted(runs: int) -> Iterator[dict[str, Any]]:
    """Of so many runs with each kind of mixing, those in which anything was released."""
    missed = dict.fromkeys(planted_mixing.PLANTED, 0)
    for number in range(1, runs + 1):
        for name in missed:
            missed[name] += planted_mixing.is_missed(name)
        yield {
            "runs_of_each": number,
            "kinds": len(missed),
            "missed": missed,
            "most_missed_of_one_kind": max(missed.values()),
            "found_in_all": 1 - sum(missed.values()) / (number * len(missed)),
        }


def healthy(steps: int) -> Iterator[dict[str, Any]]:
    """So many steps over all models of the zoo; a false alarm would be an exception."""
    pairs = [(name, kind) for name in healthy_zoo.ZOO for kind in healthy_zoo.PRECISIONS]
    taken, samples, alarms = dict.fromkeys(healthy_zoo.ZOO, 0), 0, list[str]()
    for name, kind in pairs * math.ceil(steps / len(pairs) / STEPS_OF_A_RUN):
        try:
            private = healthy_zoo.train(name, kind, STEPS_OF_A_RUN)
        except Exception as error:  # Counted, and told in full.
            alarms.append(f"{name}, {kind}: {error}")
            continue
        taken[name] += private.steps_taken
        samples += private.engine.num_checked
        yield {
            "steps": sum(taken.values()),
            "check_rate": healthy_zoo.RATE,
            "samples_exchanged": samples,
            "steps_of_each": taken,
            "false_alarms": alarms,
        }


def cost(steps: int) -> Iterator[dict[str, Any]]:
    """The share of the time that all checks of one run take, after some steps and after all."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 10))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")

    records = torch.randn(20_000, 256), torch.randint(10, (20_000,))
    make, texts, collate, of_texts, _ = healthy_zoo.ZOO["BERT"]
    yield {
        "MLP": _shares(model, steps, TensorDataset(*records), loss, 256),
        "BERT of the zoo": _shares(make, steps, texts, of_texts, healthy_zoo.EXPECTED, collate),
    }


def _shares(
    make: Callable[[], nn.Module],
    steps: int,
    data: Any,
    loss: Any,
    batch_size: int,
    collate: Any = None,
) -> dict[str, Any]:
    """The share of the checks in the time of one run, after so many steps."""
    model, found = make(), dict[str, Any]()
    private = make_private(
        model, torch.optim.AdamW(model.parameters()), dataset_size=len(data), delta=1e-6,
        expected_batch_size=batch_size, num_steps=steps, noise_multiplier=1.0, shuffle="off",
        physical_batch_size=batch_size, loss=loss,
    )  # fmt: skip
    private.clock.start()
    began, marks = time.perf_counter(), {10, 100, steps // 2, steps}
    for batch in private.batches(data, collate=collate):
        private.backward(loss(model, batch))
        private.step()
        if private.steps_taken in marks:
            whole = time.perf_counter() - began
            share = private.clock.seconds()["checks"] / whole
            found[f"after {private.steps_taken} steps"] = {
                "seconds": round(whole, 2), "share_of_checks": round(share, 4)
            }  # fmt: skip
    private.close()
    return found


PARTS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "planted": planted, "healthy": healthy, "cost": cost
}  # fmt: skip


def main(file: Path, part: str, size: int) -> None:
    """Measure one part and write it into the file, beside the others."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    for found in PARTS[part](size):
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        known[part] = {
            **found,
            "seconds": round(time.perf_counter() - started),
            "command": COMMAND.format(part=part, size=size),
            "commit": commit.stdout.strip(),
            "environment": environment(),
        }
        file.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
