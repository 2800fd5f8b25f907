"""Tables 3 to 5: what methods reach at a budget, from the cells of sweeps.

`paper` runs the presets of the table with the paper's own methods, which takes a GPU, the
checkpoints and days. `demo` runs the same grid for table 3 on digits. For tables 4 and 5 it shows
the runs that are there: no text model from random weights learns at these budgets in minutes.
Results of any sweep on the same data set join the table when it is drawn from results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd_experiments.exhibits import SCALES, Exhibit, Reproduction, Request, Scale
from shuffled_dpsgd_experiments.presets import PRESETS
from shuffled_dpsgd_experiments.sweeps.grid import Sweep, laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.running import run_sweeps
from shuffled_dpsgd_experiments.sweeps.search import LOWER_IS_BETTER
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.sweeps.table import rows_of
from shuffled_dpsgd_experiments.tables.printed import EPSILONS
from shuffled_dpsgd_experiments.tables.training_rows import (
    grouped,
    lost_samples,
    missing_rows,
    rows_from,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
_METHODS: list[dict[str, Any]] = [
    {"name": "non-private", "epsilons": [], "run": {"privacy": {"method": "non-private"}}},
    {"name": "ghost", "run": {"privacy": {"method": "ghost"}}},
    {"name": "mixopt", "run": {"privacy": {"method": "mixopt"}}},
    {
        "name": "shuffled, paper, c' = c",
        "batch_clip_ratio": 1,
        "run": {"privacy": {"method": "shuffled", "accounting": "paper"}},
    },
]
DEMO: dict[str, Any] = {
    "task": "digits",
    "model": {"name": "vit-digits"},
    "data": {"format": "digits"},
    "privacy": {"delta": 1e-4},
    "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
    "training": {"expected_batch_size": 288, "epochs": 10, "num_threads": 1},
}


@dataclass(frozen=True)
class TrainingTable:
    """One of the three: its title, the formats of its data sets, and a small run if it has one."""

    name: str
    title: str
    formats: tuple[str, ...]
    demo: Mapping[str, Any] | None = None

    def sweeps(self, scale: Scale, work: Path, data: Path | None) -> list[Sweep]:
        """The grids to run, one for every preset of the table, or its demonstration."""
        if scale == "demo":
            if self.demo is None:
                return []
            raw = _grid(f"demo {self.name}", dict(self.demo), 1.0)
            return [parse_sweep(raw, results=work / f"demo_{self.name}")]
        found = []
        for name, preset in PRESETS.items():
            if preset.data_format in self.formats:
                run = preset.to_run(data=None if data is None else str(data / preset.data_format))
                run["privacy"] = {"delta": preset.delta}
                raw = _grid(name, run, preset.clip_norm)
                found.append(parse_sweep(raw, results=work / name.removeprefix("paper/")))
        return found

    def run(self, request: Request) -> list[Path]:
        """Run what is missing of the table's grids; every cell stays in its folder."""
        sweeps = self.sweeps(request.scale, request.output, request.data)
        if not sweeps:
            request.say(f"{self.name} has no demonstration: runs in {request.output} are shown")
        for sweep in sweeps:
            run_sweeps([sweep], on_progress=lambda progress: request.say(progress.describe()))
        return []

    def read(self, request: Request) -> tuple[list[Record], Scale]:
        """Cells of the paper's scale where there are any, else the demonstration's."""
        found = {scale: self.records(request.output, scale) for scale in SCALES}
        scale = request.scale
        if request.from_results or self.demo is None:
            scale = "paper" if found["paper"] or not found["demo"] else "demo"
        return found[scale], scale

    def records(self, results: Path, scale: Scale) -> list[Record]:
        """Every main cell under `results` that belongs to the table: its data sets, or its demo."""
        folders = sorted({path.parent for path in results.glob("**/main_*.json")})
        every = [record for folder in folders for record in read_records(folder)]
        if scale == "demo":
            return [record for record in every if record["sweep"] == f"demo {self.name}"]
        real = (record for record in every if not record["sweep"].startswith("demo "))
        return [record for record in real if _format_of(record) in self.formats]

    def show(self, found: tuple[Sequence[Record], Scale]) -> Exhibit:
        """Our cells, each beside what the paper printed for that method; then what has no cell."""
        records, scale = found
        rows = rows_from(self.name, records)
        if scale != "demo":
            rows += missing_rows(self.name, {_format_of(record) for record in records})
        return Exhibit(
            name=self.name,
            title=self.title,
            origin=self._origin(records, scale),
            rows=tuple(rows),
            notes=(
                "Paper: as printed, for the models it names. Ours: mean ± standard deviation over "
                "seeds, of the model named in the row.",
                "The paper's ε for its own method is heuristic. No ε covers tuning.",
                *lost_samples(records),
            ),
        )

    def _origin(self, records: Sequence[Record], scale: Scale) -> str:
        if not records:
            return "No result of this table is there."
        hardware = sorted({record["environment"]["hardware"] for record in records})
        days = sorted({record["environment"]["date"] for record in records})
        made = f"{len(records)} runs on {', '.join(hardware)}, {' to '.join(days)}."
        return f"Scale: demo. {made}" if scale == "demo" else made


def _grid(name: str, run: dict[str, Any], clip: float) -> dict[str, Any]:
    plain, *private = (laid_over(each) for each in _METHODS)
    clipped = [laid_over(each, {"run": {"privacy": {"clip_norm": clip}}}) for each in private]
    methods = [plain, *clipped]
    return {"name": name, "epsilons": [*EPSILONS], "seeds": [0], "run": run, "methods": methods}


def _format_of(record: Record) -> str:
    return str(record["config"]["data"]["format"])


def draw(found: tuple[Sequence[Record], Scale]) -> Figure | None:
    """A panel for each sweep with the paper's method: scores over certified ε, and their spread."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    every = [(what, rows_of(records)) for (what, _, _), records in grouped(found[0]).items()]
    groups = [
        (what, rows)
        for what, rows in every
        if any(row.privacy.get("accounting") == "paper" for row in rows)
    ]
    if not groups:
        return None
    lines = -(-len(groups) // 2)
    figure = Figure(figsize=(10.0, 3.6 * lines + 0.2), layout="constrained")
    panels = figure.subplots(lines, 2, squeeze=False).flat
    for axes, (what, rows) in zip(panels, groups, strict=False):
        drawn = [row for row in rows if row.scores and row.certified]
        for method in dict.fromkeys(row.method for row in drawn):
            mine = [row for row in drawn if row.method == method]
            mine.sort(key=lambda row: row.certified or 0.0)
            unit = 100.0 if rows[0].score_name == "accuracy" else 1.0
            axes.errorbar(
                [row.certified or 0.0 for row in mine],
                [unit * row.mean for row in mine],
                [unit * (row.spread or 0.0) for row in mine],
                fmt="o-",
                markersize=4,
                linewidth=1.2,
                label=method,
            )
        score = "accuracy, %" if rows[0].score_name == "accuracy" else rows[0].score_name
        axes.set(title=what, xlabel="certified ε (proven)", xscale="log", ylabel=score)
        if rows[0].score_name in LOWER_IS_BETTER:
            axes.set(yscale="log", ylabel=f"{score}, less is better")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(fontsize=7)
    for axes in panels:
        axes.set_axis_off()
    return figure


TABLES = {
    table.name: table
    for table in (
        TrainingTable("table3", "Table 3: image classification", ("cifar100",), DEMO),
        TrainingTable("table4", "Table 4: text classification", ("sst2", "qqp", "mnli", "qnli")),
        TrainingTable("table5", "Table 5: text generation", ("dart", "e2e")),
    )
}
REPRODUCTIONS = tuple(
    Reproduction(name=t.name, title=t.title, run=t.run, read=t.read, show=t.show, draw=draw)
    for t in TABLES.values()
)
