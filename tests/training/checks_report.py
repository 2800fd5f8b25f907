"""How often planted mixing is found in time, whether healthy runs are stopped, and what it costs.

Run as a script, in parts: `python checks_report.py FILE planted 100`, `... FILE healthy 10000` and
`... FILE cost 3000`. What is known of a part is in the file after every round of it.
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

from shuffled_dpsgd.clipping.checks.check_turns import SHARE_OF_TIME
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.training import make_private
from training import healthy_zoo, planted_mixing

COMMAND = "python tests/training/checks_report.py results/checks.json {part} {size}"
# The steps of a run of each model of the zoo: several short runs, because most is looked at first.
STEPS_OF_A_RUN = 100
# How long a run is to which what was measured is extended.
LONG_RUN = 10_000


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
    """What checks take before the first release, and their share of the time after it."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, num_labels=healthy_zoo.CLASSES,
    )  # fmt: skip
    ids = torch.randint(8000, (4096, 128))
    rows = [{"ids": row, "y": label % 3} for label, row in enumerate(ids)]

    def texts(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch["ids"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["y"], reduction="none")

    make, data, collate, loss, _ = healthy_zoo.ZOO["MLP"]
    found = {"MLP of 6 inputs": _shares(make(), steps, data, loss, collate)}
    yield found
    bert = BertForSequenceClassification(config)
    found["BERT of 4 layers"] = _shares(bert, max(steps // 40, 4), rows, texts, None)
    yield found


def _shares(model: nn.Module, steps: int, data: Any, loss: Any, collate: Any) -> dict[str, Any]:
    private = make_private(
        model, torch.optim.AdamW(model.parameters()), dataset_size=len(data), delta=1e-6,
        expected_batch_size=32, num_steps=steps, noise_multiplier=1.0, shuffle="off",
        physical_batch_size=48, loss=loss,
    )  # fmt: skip
    private.clock.start()
    # Seconds of all looks, of those among them that are a check of a batch, and of everything:
    # at the start, after the first step, half way, at the end.
    marks = [(0.0, 0.0, time.perf_counter())]
    for batch in private.batches(data, collate=collate):
        private.backward(loss(model, batch))
        if private.step() and private.steps_taken in (1, steps // 2, steps):
            looks = private.clock.seconds()["checks"]
            marks.append((looks, private.check_seconds, time.perf_counter()))
    private.close()
    looks, checks, everything = zip(*marks, strict=True)
    seconds = everything[3] - everything[2]
    # By half way, every kind of batch has come that there is; only the clock decides on more.
    every_step = (looks[3] - looks[2] - checks[3] + checks[2]) / seconds
    long = everything[3] - everything[0] + seconds * (LONG_RUN - steps) / (steps - steps // 2)
    return {
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds_of_a_step": round(seconds / (steps - steps // 2), 4),
        "steps_that_checks_before_the_first_release_take": round(
            looks[1] / seconds * (steps - steps // 2), 1
        ),
        "share_of_what_every_step_is_looked_at_for": round(every_step, 4),
        f"share_of_{LONG_RUN}_steps_at_most": round(
            every_step + max(SHARE_OF_TIME, checks[3] / long), 4
        ),
    }


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
