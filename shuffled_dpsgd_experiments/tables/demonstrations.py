"""What stands for tables 3 to 5 where there is no GPU: small models, digits or generated texts.

Each grid of ten runs takes a few minutes of one core. Texts have the layouts of SST-2 and E2E. They
are made of templates and nobody wrote them, so scores on them say nothing about the real data sets.
There are many, for at a given ε noise matters less the smaller the share of records in a batch.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

GENERATED = "generated texts"
GOOD = ("delightful", "moving", "funny", "brilliant", "charming", "tender", "clever", "fresh")
BAD = ("dull", "tedious", "clumsy", "bland", "dreadful", "lifeless", "hollow", "stale")
SUBJECTS = ("film", "plot", "cast", "script", "ending", "score", "dialogue", "story")
FRAMES = ("the {s} is {a}", "a {a} {s}", "what a {a} {s}", "{s} and camera are {a}", "so {a} a {s}")
NAMES = ("Alimentum", "Aromi", "Bibimbap", "Clowns", "Cotto", "Giraffe", "Zizzi", "Strada")
FOODS = ("Italian", "French", "Indian", "English", "Japanese", "Chinese")


def write_sentences(folder: Path, *, train: int = 20_000, dev: int = 400) -> Path:
    """`train.tsv` and `dev.tsv` as SST-2 has them."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("dev", dev)):
        lines = ["sentence\tlabel"]
        for _ in range(count):
            label = draw.randrange(2)
            words = {"s": draw.choice(SUBJECTS), "a": draw.choice(GOOD if label else BAD)}
            lines.append(f"{draw.choice(FRAMES).format(**words)}\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_restaurants(folder: Path, *, train: int = 20_000, dev: int = 60) -> Path:
    """`trainset.csv` and `devset.csv` as E2E has them."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("trainset", train), ("devset", dev)):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["mr", "ref"])
            for _ in range(count):
                place, food = map(draw.choice, (NAMES, FOODS))
                table.writerow([f"name[{place}], food[{food}]", f"{place} serves {food} food."])
    return folder


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One small run, but for its method; `plain_learning_rate` is that of non-private training.

    `write_texts` puts the records into a folder; None for data that come with the package's extras.
    """

    run: Mapping[str, Any]
    clip_norm: float
    plain_learning_rate: float
    write_texts: Callable[[Path], Path] | None = None

    def to_run(self, work: Path) -> dict[str, Any]:
        """What all cells share; texts are written below `work`."""
        run = {**self.run, "data": dict(self.run["data"])}
        run["training"] = {**self.run["training"], "num_threads": 1}
        if self.write_texts is not None:
            folder = self.write_texts(work / f"generated_{run['data']['format']}")
            run["data"] |= {"path": str(folder), "name": GENERATED}
        return run


DEMONSTRATIONS: Mapping[str, Demonstration] = MappingProxyType(
    {
        "table3": Demonstration(
            run={
                "task": "digits",
                "model": {"name": "vit-digits"},
                "data": {"format": "digits"},
                "privacy": {"delta": 1e-4},
                "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
                "training": {"expected_batch_size": 288, "epochs": 10},
            },
            clip_norm=1.0,
            plain_learning_rate=1e-2,
        ),
        "table4": Demonstration(
            run={
                "task": "text-classification",
                "model": {"name": "bert-tiny"},
                "data": {"format": "sst2", "max_length": 48},
                "privacy": {"delta": 2.5e-5},
                "optimizer": {"learning_rate": 2e-2, "schedule": "cosine"},
                "training": {"expected_batch_size": 500, "num_steps": 30},
            },
            clip_norm=0.1,
            plain_learning_rate=5e-3,
            write_texts=write_sentences,
        ),
        "table5": Demonstration(
            run={
                "task": "causal-lm",
                "model": {"name": "gpt2-tiny"},
                "data": {"format": "e2e", "max_length": 64},
                "privacy": {"delta": 2.5e-5},
                "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
                "training": {"expected_batch_size": 250, "num_steps": 20},
                "generation": {"max_new_tokens": 32, "bleu": "plain"},
            },
            clip_norm=0.1,
            plain_learning_rate=5e-3,
            write_texts=write_restaurants,
        ),
    }
)
