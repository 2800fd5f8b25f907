"""Runs what is missing of a workload: the rates of every point first, then seed after seed.

Every point is tuned in the same way: four rates, each twice the one before, with the same seeds, on
records held back. While the best lies at an end, the grid is extended there.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from shuffled_dpsgd_experiments.frontier.cells import (
    FIRST_SEED,
    CellFile,
    Record,
    Stage,
    cell_key,
    point_of,
    run_cell,
)
from shuffled_dpsgd_experiments.frontier.workloads import Material, Point, Workload

FIRST_POWERS = (-1, 0, 1, 2)
FURTHEST = 8
"""Powers of two from the middle rate beyond which no grid is extended."""
Say = Callable[[str], object]


def run(workload: Workload, material: Material, cells: CellFile, *, say: Say) -> bool:
    """Run every cell without a record; True when all have one, False after a signal."""
    gc.collect()
    # What a cell leaves is collected after it; what is there now stays, and is not looked at.
    gc.freeze()
    started, ran = time.monotonic(), 0
    for point, stage, rate, seed, done in _wanted(workload, cells):
        key = cell_key(workload, material, point, stage=stage, rate=rate, seed=seed)
        cells.check(key)
        if cells.find(key):
            continue
        record = run_cell(workload, material, point, stage=stage, rate=rate, seed=seed)
        gc.collect()
        if record is None:
            return False
        cells.add(record)
        ran += 1
        score = ", ".join(f"{100 * s:.1f} % {name}" for name, s in record["accuracy"].items())
        each = (time.monotonic() - started) / ran
        say(
            f"{workload.name}, {done}: {point.describe()}, rate {rate:g}, seed {seed}: "
            f"{score}; {each:.1f} s a cell"
        )
    return True


def missing(workload: Workload, records: list[Record]) -> str:
    """What has no record yet, in words for people; empty if nothing is missing."""
    runs = Counter(point_of(record) for record in records if record["stage"] == "figure")
    rates = tuned_rates(workload, records)
    parts = [
        f"{point.describe()} ({workload.seeds_of(point) - runs[point]} runs"
        + (")" if point in rates else " and its tuning)")
        for point in workload.points()
        if runs[point] < workload.seeds_of(point)
    ]
    return f"{workload.name}, {workload.title}: {'; '.join(parts)}" if parts else ""


def tuned_rates(workload: Workload, records: list[Record]) -> dict[Point, float]:
    """The best rate of every point whose grid is complete."""
    found = {}
    for point in workload.points():
        means = _means(workload, records, point)
        if means and _next_power(means) is None:
            found[point] = workload.middle_rate * 2.0 ** _best(means)
    return found


def tried_rates(workload: Workload, records: list[Record], point: Point) -> dict[float, float]:
    """Mean accuracy on records held back, by rate, of complete sets of seeds."""
    means = _means(workload, records, point)
    return {workload.middle_rate * 2.0**power: means[power] for power in sorted(means)}


def _means(workload: Workload, records: list[Record], point: Point) -> dict[int, float]:
    """By power of two; only what was run with all seeds."""
    scores: dict[int, list[float]] = {}
    for record in records:
        if record["stage"] == "tuning" and point_of(record) == point:
            power = round(math.log2(record["learning_rate"] / workload.middle_rate))
            scores.setdefault(power, []).append(record["accuracy"]["held back"])
    return {p: fmean(s) for p, s in scores.items() if len(s) >= workload.num_tuning_seeds}


def _best(means: Mapping[int, float]) -> int:
    """The power of the best mean; of equals the one nearest to the middle."""
    return max(means, key=lambda power: (means[power], -abs(power - 0.5)))


def _next_power(means: Mapping[int, float]) -> int | None:
    """What to try next; None if the best rate has one tried on either side of it."""
    missing = [power for power in FIRST_POWERS if power not in means]
    if missing:
        return missing[0]
    best = _best(means)
    beyond = {min(means): min(means) - 1, max(means): max(means) + 1}.get(best)
    return beyond if beyond is not None and abs(beyond) <= FURTHEST else None


def _wanted(workload: Workload, cells: CellFile) -> Iterator[tuple[Point, Stage, float, int, str]]:
    """Every cell in the order of running; what tuning tries next depends on what it has found."""
    points = workload.points()
    for point in points:
        while (power := _next_power(_means(workload, cells.read(), point))) is not None:
            for number in range(workload.num_tuning_seeds):
                rate = workload.middle_rate * 2.0**power
                yield point, "tuning", rate, FIRST_SEED["tuning"] + number, "tuning"
    rates = tuned_rates(workload, cells.read())
    most = max(map(workload.seeds_of, points))
    places = [
        (number, point)
        for number, point in itertools.product(range(most), points)
        if number < workload.seeds_of(point)
    ]
    for place, (number, point) in enumerate(places, start=1):
        done = f"{place} of {len(places)}"
        yield point, "figure", rates[point], FIRST_SEED["figure"] + number, done


def cells_of(workload: Workload, folder: Path) -> CellFile:
    """The file of a workload's cells."""
    return CellFile(folder / "frontier" / f"{workload.name}.jsonl", workload)
