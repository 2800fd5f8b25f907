"""Runs what is missing of a workload: the rates of every point first, then seed after seed.

Every point is tuned in the same way: four rates, each twice the one before, with the same seeds, on
records held back. While the best lies at an end, the grid is extended there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

import torch

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


def run(
    workload: Workload,
    material: Material,
    cells: CellFile,
    *,
    say: Say,
    stop_after: float | None = None,
) -> bool:
    """Run every cell without a record; True when all have one, False after a signal or in time."""
    return _Run(workload, material, cells, say, stop_after).go()


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
            power = round(
                torch.tensor(record["learning_rate"] / workload.middle_rate).log2().item()
            )
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


class _Run:
    def __init__(
        self,
        workload: Workload,
        material: Material,
        cells: CellFile,
        say: Say,
        stop_after: float | None,
    ) -> None:
        self._workload = workload
        self._material = material
        self._cells = cells
        self._say = say
        self._started = time.monotonic()
        self._stop_after = stop_after
        self._ran = 0

    def go(self) -> bool:
        gc.collect()
        # What a cell leaves is collected after it; what is there now stays, and is not looked at.
        gc.freeze()
        for point in self._workload.points():
            for rate, seed in self._trials(point):
                if not self._cell(point, "tuning", rate, seed, "tuning"):
                    return False
        rates = tuned_rates(self._workload, self._cells.read())
        points, seeds = self._workload.points(), self._workload.num_seeds
        for number in range(seeds):
            for place, point in enumerate(points):
                done = f"{number * len(points) + place + 1} of {seeds * len(points)}"
                seed = FIRST_SEED["figure"] + number
                if not self._cell(point, "figure", rates[point], seed, done):
                    return False
        return True

    def _trials(self, point: Point) -> Iterator[tuple[float, int]]:
        """Rate and seed, one after the other, as what was found so far asks for."""
        while True:
            power = _next_power(_means(self._workload, self._cells.read(), point))
            if power is None:
                return
            for number in range(self._workload.num_tuning_seeds):
                yield self._workload.middle_rate * 2.0**power, FIRST_SEED["tuning"] + number

    def _cell(self, point: Point, stage: Stage, rate: float, seed: int, done: str) -> bool:
        key = cell_key(self._workload, self._material, point, stage=stage, rate=rate, seed=seed)
        if self._cells.find(key) is not None:
            return True
        passed = time.monotonic() - self._started
        if self._stop_after is not None and passed > self._stop_after:
            return False
        record = run_cell(self._workload, self._material, point, stage=stage, rate=rate, seed=seed)
        gc.collect()
        if record is None:
            return False
        self._cells.add(record)
        self._ran += 1
        score = ", ".join(f"{100 * s:.1f} % {name}" for name, s in record["accuracy"].items())
        each = (time.monotonic() - self._started) / self._ran
        self._say(
            f"{self._workload.name}, {done}: {point.describe()}, rate {rate:g}, seed {seed}: "
            f"{score}; {each:.1f} s a cell"
        )
        return True


def cells_of(workload: Workload, folder: Path) -> CellFile:
    """The file of a workload's cells."""
    return CellFile(folder / "frontier" / f"{workload.name}.jsonl")
