"""One run of the frontier, and the file of all of them: one line of JSON each, never rewritten."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch

from shuffled_dpsgd import make_private
from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd.environment import PACKAGES, today, versions
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.tasks import Task
from shuffled_dpsgd.tasks.config import OptimizerConfig, RateSchedule
from shuffled_dpsgd.tasks.start import build_optimizer, build_scheduler
from shuffled_dpsgd.training.global_randomness import seed_dropout
from shuffled_dpsgd.training.loop import LoopSettings, train
from shuffled_dpsgd.training.spending import paper_estimate
from shuffled_dpsgd_experiments.frontier.workloads import (
    CLIP_NORM,
    OURS,
    Material,
    Point,
    Workload,
    settings_digest,
)
from shuffled_dpsgd_experiments.provenance import Provenance

Stage = Literal["tuning", "figure"]
Record = dict[str, Any]
FIRST_SEED = {"tuning": 0, "figure": 100}
_KEYS = ["workload", "stage", "algorithm", "epsilon", "batch_clip_ratio", "learning_rate", "seed"]
_KEYS += ["streams", "settings", "ingredients"]


def run_cell(
    workload: Workload, material: Material, point: Point, *, stage: Stage, rate: float, seed: int
) -> Record | None:
    """Train and score once; None if a signal ended it."""
    task = material.tuning if stage == "tuning" else material.scored
    started = time.perf_counter()
    seed_dropout(seed)
    model = task.fresh_model(seed)
    provenance = Provenance(model, material.digest)
    schedule: RateSchedule = "constant" if point.ingredients else "cosine"
    config = OptimizerConfig(learning_rate=rate, schedule=schedule)
    private = make_private(
        model,
        build_optimizer(model, config),
        dataset_size=len(task.train_data),
        expected_batch_size=workload.expected_batch_size,
        num_steps=workload.num_steps,
        delta=workload.delta,
        clip_norm=CLIP_NORM,
        seed=seed,
        # Every logical batch in one piece.
        physical_batch_size=2 * workload.expected_batch_size,
        **point.options(workload.scope),
    )
    scheduler = build_scheduler(private.optimizer, config, private.plan.num_steps)
    settings = LoopSettings(collate=task.collate, price_steps=False)
    try:
        outcome = train(
            private,
            task.train_data,
            task.losses,
            settings=settings,
            callbacks=[provenance],
            scheduler=scheduler,
        )
    finally:
        private.close()
    if not outcome.finished:
        return None
    plan = private.plan
    certified, paper = plan.certified(), paper_estimate(plan)
    assert certified is not None, "every point has noise and a clip"
    return {
        **cell_key(workload, material, point, stage=stage, rate=rate, seed=seed),
        **_scores(task, model),
        "certified_epsilon": certified.epsilon,
        "paper_epsilon": None if paper is None else paper.epsilon,
        "noise_multipliers": {block.name: block.noise_multiplier for block in plan.blocks},
        "dimensions": {block.name: block.dimension for block in plan.blocks},
        **provenance.to_json(),
        "versions": versions(PACKAGES),
        "date": today(),
        "seconds": round(time.perf_counter() - started, 2),
    }


def cell_key(
    workload: Workload, material: Material, point: Point, *, stage: Stage, rate: float, seed: int
) -> Record:
    """What tells a cell from all others; everything it finds follows from this and the code."""
    algorithm = "paper" if point.is_paper else "dp-sgd"
    settings = settings_digest(workload, material.digest)
    ratio, streams = point.batch_clip_ratio, STREAM_VERSION
    values = workload.name, stage, algorithm, point.epsilon, ratio, rate, seed, streams, settings
    return dict(zip(_KEYS, (*values, point.ingredients), strict=True))


def point_of(record: Record) -> Point:
    """The point that a record belongs to."""
    return Point(
        epsilon=record["epsilon"],
        batch_clip_ratio=record["batch_clip_ratio"],
        ingredients=record.get("ingredients", OURS),
    )


def _scores(task: Task, model: torch.nn.Module) -> Record:
    found = {name: of(model) for name, of in task.evaluations.items()}
    return {
        "accuracy": {name: each.score for name, each in found.items()},
        "loss": {name: round(each.loss, 6) for name, each in found.items()},
        "classes_answered": {name: each.predicted_classes for name, each in found.items()},
    }


class CellFile:
    """Cells of one workload. Lines are appended and never edited; a half-written last one is cut.

    Processes may share the file, if each runs cells of its own. All are of the same data, settings
    and streams, and those of a point in the figure of the same rate.
    """

    def __init__(self, path: Path, workload: Workload) -> None:
        self.path, self._workload = path, workload
        self._found: dict[str, Record] = {}
        self._same: Record = {}
        self._rates: dict[Point, float] = {}
        self._size = 0
        self.read()

    def read(self) -> list[Record]:
        """Every record, with what others have added since.

        Raises:
            CheckpointError: a line is no cell, or one that may not be averaged with the others.
        """
        if self.path.is_file() and self.path.stat().st_size != self._size:
            whole = self.path.read_bytes()
            self._size = len(whole)
            for line in whole[: whole.rfind(b"\n") + 1].splitlines():
                try:
                    record = json.loads(line)
                    self._same = self._same or {
                        "workload": self._workload.name,
                        "settings": settings_digest(self._workload, record["data"]),
                        **{key: record[key] for key in ("data", "streams")},
                    }
                    self._found.setdefault(_name(record), record)
                except (ValueError, KeyError, TypeError) as error:
                    raise CheckpointError(
                        f"{self.path}: a line that is no cell ({error}); move the file away"
                    ) from error
                self.check(record)
        return list(self._found.values())

    def check(self, cell: Record) -> None:
        """Refuse a cell, or the key of one, that may not be averaged with those that are here."""
        same = dict(self._same)
        if cell["stage"] == "figure":
            same["learning_rate"] = self._rates.setdefault(point_of(cell), cell["learning_rate"])
        for name, value in same.items():
            if cell.get(name, value) != value:
                raise CheckpointError(
                    f"{self.path}: a cell of {name} {cell[name]}, where {value} is expected; cells "
                    "that differ in it are never averaged: move the file away, or the cell"
                )

    def find(self, key: Record) -> Record | None:
        """The record of a cell, if it was run."""
        return self._found.get(_name(key))

    def add(self, record: Record) -> None:
        """Append a record; one that is there already stays as it is.

        Raises:
            CheckpointError: the cell has a record.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.read()
            self.check(record)
            if self.find(record) is not None:
                raise CheckpointError(f"{self.path}: the cell has a record, which is never changed")
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write((json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode())
        self.read()


def _name(key: Record) -> str:
    """Records from before there were ingredients to compare have those of the curves."""
    found = {"ingredients": OURS, **key}
    return json.dumps([found[each] for each in _KEYS])
