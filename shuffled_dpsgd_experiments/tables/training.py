"""Tables 3 to 5: what methods reach at a budget, from the cells of sweeps.

`paper` runs the presets of the table with the paper's own methods, which takes a GPU, the
checkpoints and days. `demo` runs the same grid on small models, digits or generated texts. Results
of any sweep on the same data set join the table when it is drawn from results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd_experiments.presets import PRESETS
from shuffled_dpsgd_experiments.sweeps import Sweep, run_sweep
from shuffled_dpsgd_experiments.sweeps.grid import laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.tables.demonstrations import DEMONSTRATIONS
from shuffled_dpsgd_experiments.tables.exhibit import Exhibit
from shuffled_dpsgd_experiments.tables.printed import EPSILONS
from shuffled_dpsgd_experiments.tables.training_rows import lost_samples, missing_rows, rows_from

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class TrainingTable:
    """One of the three: its title and its data sets."""

    name: str
    title: str
    formats: tuple[str, ...]


TABLES: Mapping[str, TrainingTable] = MappingProxyType(
    {
        "table3": TrainingTable(
            name="table3",
            title="Table 3: image classification",
            formats=("cifar100",),
        ),
        "table4": TrainingTable(
            name="table4",
            title="Table 4: text classification",
            formats=("sst2", "qqp", "mnli", "qnli"),
        ),
        "table5": TrainingTable(
            name="table5",
            title="Table 5: text generation",
            formats=("dart", "e2e"),
        ),
    }
)
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


def sweeps_at(table: TrainingTable, scale: str, work: Path, data: Path | None) -> list[Sweep]:
    """The grids to run, one for every preset of the table, or one demonstration."""
    if scale == "demo":
        return [_demo(table, work)]
    return [
        _preset_sweep(name, work, data)
        for name, preset in PRESETS.items()
        if preset.data_format in table.formats
    ]


def _grid(name: str, run: dict[str, Any], clip: float) -> dict[str, Any]:
    methods = [
        each
        if each["name"] == "non-private"
        else laid_over(each, {"run": {"privacy": {"clip_norm": clip}}})
        for each in _METHODS
    ]
    return {"name": name, "epsilons": [*EPSILONS], "seeds": [0], "run": run, "methods": methods}


def _preset_sweep(name: str, work: Path, data: Path | None) -> Sweep:
    preset = PRESETS[name]
    folder = None if data is None else str(data / preset.data_format)
    run = preset.to_run(data=folder)
    run["privacy"] = {"delta": preset.delta}
    short = name.removeprefix("paper/")
    return parse_sweep(_grid(name, run, preset.clip_norm), results=work / short)


def _demo(table: TrainingTable, work: Path) -> Sweep:
    demo = DEMONSTRATIONS[table.name]
    raw = _grid(f"demo {table.name}", demo.to_run(work), demo.clip_norm)
    plain = {"run": {"optimizer": {"learning_rate": demo.plain_learning_rate}}}
    raw["methods"] = [
        laid_over(each, plain) if each["name"] == "non-private" else each for each in raw["methods"]
    ]
    return parse_sweep(raw, results=work / f"demo_{table.name}")


def run(table: TrainingTable, scale: str, work: Path, *, data: Path | None, say: Say) -> None:
    """Run what is missing of the table's grids; every cell stays in `work`."""
    for sweep in sweeps_at(table, scale, work, data):
        run_sweep(sweep, on_progress=lambda progress: say(progress.describe()))


def records_for(table: TrainingTable, results: Path, scale: str) -> list[dict[str, Any]]:
    """Every main cell under `results` that belongs to the table: its data sets, or its demo."""
    found = []
    for folder in sorted({path.parent for path in results.glob("**/main_*.json")}):
        for record in read_records(folder):
            is_demo = record["sweep"].startswith("demo ")
            if is_demo != (scale == "demo"):
                continue
            if record["sweep"] == f"demo {table.name}" or (
                not is_demo and _format_of(record) in table.formats
            ):
                found.append(record)
    return found


def _format_of(record: Mapping[str, Any]) -> str:
    return str(record["config"]["data"]["format"])


def exhibit(table: TrainingTable, records: list[dict[str, Any]], scale: str) -> Exhibit:
    """Our cells, each beside what the paper printed for that method; then what has no cell."""
    rows = rows_from(table.name, records)
    if scale != "demo":
        rows += missing_rows(table.name, {_format_of(record) for record in records})
    return Exhibit(
        name=table.name,
        title=table.title,
        origin=_origin(table, records, scale),
        rows=tuple(rows),
        notes=(
            "Paper: as printed, for the models it names. Ours: mean ± standard deviation over "
            "seeds, of the model named in the row.",
            "The paper's ε for its own method is heuristic. No ε covers tuning.",
            *lost_samples(records),
        ),
    )


def _origin(table: TrainingTable, records: list[dict[str, Any]], scale: str) -> str:
    if not records:
        return "No result of this table is there."
    hardware = sorted({record["environment"]["hardware"] for record in records})
    days = sorted({record["environment"]["date"] for record in records})
    source = ""
    if scale == "demo" and DEMONSTRATIONS[table.name].write_texts is not None:
        source = " The texts are generated from templates; scores say nothing of the real data."
    made = f"{len(records)} runs on {', '.join(hardware)}, {' to '.join(sorted({*days}))}."
    return f"Scale: demo. {made}{source}" if scale == "demo" else made
