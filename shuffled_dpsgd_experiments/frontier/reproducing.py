"""`reproduce frontier`: runs what is missing, then draws from the records alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, Reproduction, Request
from shuffled_dpsgd_experiments.frontier.cells import CellFile
from shuffled_dpsgd_experiments.frontier.curves import (
    SPLIT,
    Curves,
    Difference,
    curves_of,
    statement,
)
from shuffled_dpsgd_experiments.frontier.figure import caption, draw
from shuffled_dpsgd_experiments.frontier.running import cells_of, missing, run
from shuffled_dpsgd_experiments.frontier.workloads import WORKLOADS, Workload

NAME, TITLE = "frontier", "Accuracy over certified ε: DP-SGD and the paper's algorithm"
_FEW: dict[str, Any] = {"budgets": (0.5, 2.0, 8.0, 60.0), "num_seeds": 3, "num_tuning_seeds": 1}
DEMO: tuple[Workload, ...] = (
    replace(
        WORKLOADS["digits"],
        name="digits-demo",
        claims=(1.0,),
        ratios=(1.0, 10.0, 100.0),
        floor="digits-linear-demo",
        ingredients_at=None,
        **_FEW,
    ),
    replace(WORKLOADS["digits-linear"], name="digits-linear-demo", **_FEW),
)


def reproduce(request: Request) -> list[Path]:
    """Run what is missing, unless only results are asked for, and write the numbers.

    After a signal it stops, and leaves the rest to the next call.
    """
    workloads = DEMO if request.scale == "demo" else tuple(WORKLOADS.values())
    if not request.from_results:
        # Models this small only wait for each other on more threads.
        torch.set_num_threads(1)
        files = {each: cells_of(each, request.output) for each in workloads}
        for workload, cells in files.items():
            if left := missing(workload, cells.read()):
                request.say(f"to be run: {left}")
        for workload, cells in files.items():
            if not _run(workload, cells, request):
                request.say("stopped: the same command goes on from here; no finished run is lost")
                raise KeyboardInterrupt
    curves = read(request)
    if not curves:
        return []
    demo = curves[0].workload.name == DEMO[0].name
    path = request.output / f"{NAME}{'_demo' if demo else ''}.json"
    raw: dict[str, Any] = {
        "figure": path.stem,
        "caption": caption(curves),
        "workloads": {each.workload.name: each.to_json() for each in curves},
    }
    path.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [path]


def _run(workload: Workload, cells: CellFile, request: Request) -> bool:
    """Run what is missing; False after a signal."""
    if not missing(workload, cells.read()):
        return True
    with warnings.catch_warnings():
        # That every run spends privacy of its own stands under the figure.
        warnings.filterwarnings("ignore", message=r"run \d+ of this program on these records")
        return run(workload, workload.load(request.data), cells, say=request.say)


def read(request: Request) -> list[Curves] | None:
    """The workloads that have points; of committed results those at full size, if there are any."""
    demo = _read(DEMO, request.output)
    if request.scale == "demo" and not request.from_results:
        return demo or None
    return _read(tuple(WORKLOADS.values()), request.output) or demo or None


def _read(workloads: Sequence[Workload], folder: Path) -> list[Curves]:
    found: dict[str, Curves] = {}
    for each in reversed(workloads):
        floor = found.get(each.floor or "")
        found[each.name] = curves_of(each, cells_of(each, folder).read(), floor)
    # Floors have no claims: they stand in the panels of others, and under tables.
    return [found[each.name] for each in workloads if each.claims and found[each.name].measured]


def show(curves: Sequence[Curves]) -> Exhibit:
    """A row for every point, the floors' among them."""
    made = [f"{each.workload.name} by {_commits(each)}" for each in curves]
    return Exhibit(
        name=NAME,
        title=TITLE,
        origin=f"From {'; '.join(made)}.",
        rows=tuple(row for each in curves for row in _rows(each)),
        notes=(statement(curves), "± is one standard error of the difference."),
    )


def _rows(curves: Curves) -> list[ExhibitRow]:
    """Points of the curves beside DP-SGD, then of the floor beside the same DP-SGD."""
    found = _rows_of(curves, curves.comparisons())
    if curves.floor is not None:
        found += _rows_of(curves.floor, curves.floor_comparisons())
    return found


def _rows_of(curves: Curves, compared: Sequence[Difference]) -> list[ExhibitRow]:
    verdicts = {
        each.point: f"{each.verdict} at this ε: {each.difference:+.1f} ± {each.error:.1f}"
        for each in compared
    }
    return [
        ExhibitRow(
            what=f"{curves.workload.name}: {each.point.describe()}",
            paper="",
            ours=f"{each.scores[SPLIT].mean:.1f} % (n = {each.num_seeds})",
            certified=f"{each.certified_epsilon:.3g}",
            verdict=verdicts.get(each.point, ""),
        )
        for each in curves.measured
    ]


def _commits(curves: Curves) -> str:
    commits = ", ".join(commit[:7] + commit[40:] for commit in curves.commits)
    return f"{commits} on {' and '.join(curves.dates)}"


FRONTIER = Reproduction(
    name=NAME, title=TITLE, run=reproduce, read=read, show=show, draw=draw, redraws=True
)
