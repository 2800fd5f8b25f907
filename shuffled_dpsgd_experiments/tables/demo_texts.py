"""Generated texts in the layouts of SST-2 and E2E, for demonstrations where no data are at hand.

They are made of templates and nobody wrote them; what a model scores on them says nothing about the
real data sets.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

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
