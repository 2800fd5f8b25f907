"""`reproduce frontier`: runs what is missing, then draws from the records alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.reports.style import house_style, save_figure, to_svg
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, Reproduced, Request
from shuffled_dpsgd_experiments.frontier.curves import SPLIT, Curves, curves_of, statement
from shuffled_dpsgd_experiments.frontier.figure import caption, draw
from shuffled_dpsgd_experiments.frontier.running import cells_of, run
from shuffled_dpsgd_experiments.frontier.workloads import WORKLOADS, Workload

DEMO: tuple[Workload, ...] = (
    replace(
        WORKLOADS["digits"],
        name="digits-demo",
        budgets=(0.5, 2.0, 8.0, 60.0),
        claims=(1.0,),
        ratios=(1.0, 10.0, 100.0),
        num_seeds=3,
        num_tuning_seeds=1,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FrontierReproduction:
    """Accuracy over certified ε: the figure that decides, which the paper does not have."""

    name: str = "frontier"
    title: str = "Accuracy over certified ε: DP-SGD and the paper's algorithm"

    def reproduce(self, request: Request) -> Reproduced:
        wanted = DEMO if request.scale == "demo" else tuple(WORKLOADS.values())
        if not request.from_results:
            _run(wanted, request)
        else:
            wanted = tuple(WORKLOADS.values())
        curves = _read(wanted, request.output)
        if request.from_results and not curves:
            wanted = DEMO
            curves = _read(wanted, request.output)
        if not curves:
            why = f"no finished cells in {request.output / 'frontier'}"
            return Reproduced(name=self.name, title=self.title, missing=why)
        with house_style():
            figure = draw(curves)
        written: tuple[Path, ...] = ()
        if not (request.from_results and request.drawings):
            name = "frontier_demo" if wanted is DEMO else "frontier"
            written = (
                _write(curves, request.output / f"{name}.json"),
                *save_figure(figure, request.output, name),
            )
        return Reproduced(
            name=self.name,
            title=self.title,
            written=written,
            exhibit=self._exhibit(curves),
            drawing=to_svg(figure),
        )

    def _exhibit(self, curves: Sequence[Curves]) -> Exhibit:
        made = [f"{each.workload.name} by {_commits(each)}" for each in curves]
        return Exhibit(
            name=self.name,
            title=self.title,
            origin=f"From {'; '.join(made)}.",
            rows=tuple(row for each in curves for row in _rows(each)),
            notes=(statement(curves),),
        )


def _run(workloads: Sequence[Workload], request: Request) -> None:
    """Stops, and leaves the rest to the next call, after a signal."""
    # Models this small only wait for each other on more threads.
    torch.set_num_threads(1)
    for workload in workloads:
        material = workload.load(request.data)
        if not run(workload, material, cells_of(workload, request.output), say=request.say):
            raise KeyboardInterrupt


def _read(workloads: Sequence[Workload], folder: Path) -> list[Curves]:
    found = [curves_of(each, cells_of(each, folder).read()) for each in workloads]
    return [each for each in found if each.measured]


def _rows(curves: Curves) -> list[ExhibitRow]:
    compared = {each.point: each for each in curves.comparisons()}
    rows = []
    for each in curves.measured:
        score, verdict = each.scores[SPLIT], ""
        if each.point in compared:
            found = compared[each.point]
            verdict = f"{found.verdict} at this ε: {found.difference:+.1f} ± {found.error:.1f}"
        rows.append(
            ExhibitRow(
                what=f"{curves.workload.name}: {each.point.describe()}",
                paper="",
                ours=f"{score.mean:.1f} % (n = {each.num_seeds})",
                certified=f"{each.certified_epsilon:.3g}",
                verdict=verdict,
            )
        )
    return rows


def _commits(curves: Curves) -> str:
    commits = ", ".join(commit[:7] for commit in curves.commits)
    return f"{commits} on {' and '.join(curves.dates)}"


def _write(curves: Sequence[Curves], path: Path) -> Path:
    raw: dict[str, Any] = {
        "figure": path.stem,
        "caption": caption(curves),
        "workloads": {each.workload.name: each.to_json() for each in curves},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
