"""Tables 3 to 5: what methods reach at a budget, from the cells of sweeps.

`paper` runs the presets of the table with the paper's own methods, which takes a GPU, the
checkpoints and days. `demo` runs the same grid on small models, digits or generated texts. Results
of any sweep on the same data set join the table when it is drawn from results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd_experiments.presets import PRESETS
from shuffled_dpsgd_experiments.sweeps import Sweep, run_sweep
from shuffled_dpsgd_experiments.sweeps.grid import laid_over, parse_sweep
from shuffled_dpsgd_experiments.sweeps.table import (
    TEXT_METRICS,
    SweepRow,
    read_records,
    rows_of,
)
from shuffled_dpsgd_experiments.tables.demo_texts import write_restaurants, write_sentences
from shuffled_dpsgd_experiments.tables.exhibit import Exhibit, ExhibitRow
from shuffled_dpsgd_experiments.tables.printed import EPSILONS, METHODS, RESULTS

Say = Callable[[str], object]
LEARNT_NOTHING = "; it has learnt nothing: this is the share of the commonest class"


@dataclass(frozen=True, kw_only=True)
class TrainingTable:
    """One of the three: its title, its data sets, and what stands for them in a demonstration."""

    name: str
    title: str
    formats: tuple[str, ...]
    demo_model: str
    demo_format: str
    demo_task: str


TABLES: Mapping[str, TrainingTable] = MappingProxyType(
    {
        "table3": TrainingTable(
            name="table3",
            title="Table 3: image classification",
            formats=("cifar100",),
            demo_model="vit-digits",
            demo_format="digits",
            demo_task="digits",
        ),
        "table4": TrainingTable(
            name="table4",
            title="Table 4: text classification",
            formats=("sst2", "qqp", "mnli", "qnli"),
            demo_model="bert-tiny",
            demo_format="sst2",
            demo_task="text-classification",
        ),
        "table5": TrainingTable(
            name="table5",
            title="Table 5: text generation",
            formats=("dart", "e2e"),
            demo_model="gpt2-tiny",
            demo_format="e2e",
            demo_task="causal-lm",
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
    where: dict[str, Any] = {}
    if table.demo_format == "sst2":
        where = {"path": str(write_sentences(work / "generated_sst2")), "max_length": 48}
    elif table.demo_format == "e2e":
        where = {"path": str(write_restaurants(work / "generated_e2e")), "max_length": 96}
    # Texts are learnt from scratch at a lower rate than digits.
    rate = 1e-2 if table.demo_format == "digits" else 2e-3
    run = {
        "task": table.demo_task,
        "model": {"name": table.demo_model},
        "data": {"format": table.demo_format, **where},
        "privacy": {"delta": 1e-4},
        "optimizer": {"learning_rate": rate, "schedule": "cosine"},
        "training": {"expected_batch_size": 288, "epochs": 10, "num_threads": 1},
    }
    return parse_sweep(_grid(f"demo {table.name}", run, 1.0), results=work / f"demo_{table.name}")


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
            format_ = record["config"]["data"]["format"]
            if record["sweep"] == f"demo {table.name}" or (
                not is_demo and format_ in table.formats
            ):
                found.append(record)
    return found


def exhibit(table: TrainingTable, records: list[dict[str, Any]], scale: str) -> Exhibit:
    """Our cells, each beside what the paper printed for that method; then what has no cell."""
    rows: list[ExhibitRow] = []
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        key = _model_of(record), _data_of(record), record["config"]["data"]["format"]
        groups.setdefault(key, []).append(record)
    for (model, data, format_), group in groups.items():
        rows += _rows(table, f"{model} on {data}", format_, group)
    if scale != "demo":
        rows += _missing(table, {format_ for _, _, format_ in groups})
    return Exhibit(
        name=table.name,
        title=table.title,
        origin=_origin(table, records, scale),
        rows=tuple(rows),
        notes=(
            "Paper: as printed, for the models it names. Ours: mean ± standard deviation over "
            "seeds, of the model named in the row.",
            "The paper's ε for its own method is heuristic. No ε covers tuning.",
        ),
    )


def _model_of(record: Mapping[str, Any]) -> str:
    """The model's name; runs from its checkpoint and from random weights are told apart."""
    model = record["config"]["model"]
    return f"{model['name']} from scratch" if model.get("from_scratch") else str(model["name"])


def _data_of(record: Mapping[str, Any]) -> str:
    """The data set's title, or what the run itself called its data: a part is no whole set."""
    data = record["config"]["data"]
    format_ = str(data["format"])
    given = str(data.get("name") or format_)
    if given != format_ and not given.startswith(f"{format_} ("):
        return given
    return PUBLISHED[format_].title if format_ in PUBLISHED else format_


def _origin(table: TrainingTable, records: list[dict[str, Any]], scale: str) -> str:
    if not records:
        return "No result of this table is there."
    hardware = sorted({record["environment"]["hardware"] for record in records})
    days = sorted({record["environment"]["date"] for record in records})
    source = ""
    if scale == "demo" and table.demo_format != "digits":
        source = " The texts are generated from templates; scores say nothing of the real data."
    made = f"{len(records)} runs on {', '.join(hardware)}, {' to '.join(sorted({*days}))}."
    return f"Scale: demo. {made}{source}" if scale == "demo" else made


def _rows(
    table: TrainingTable, what: str, format_: str, records: list[dict[str, Any]]
) -> list[ExhibitRow]:
    privacy = {record["method"]: record["config"]["privacy"] for record in records}
    guess = max((record.get("baseline") or 0.0 for record in records), default=0.0)
    found = sorted(rows_of(records), key=lambda row: (row.epsilon or 0.0, row.method))
    return [
        ExhibitRow(
            what=f"{what}, {row.method}"
            + ("" if row.epsilon is None else f", ε = {row.epsilon:g}"),
            paper=_printed(table, format_, privacy[row.method], row.epsilon),
            ours=_ours(row),
            certified=row.describe_certified(),
            verdict=_verdict(row, found, privacy)
            + (LEARNT_NOTHING if guess and row.mean <= guess + 0.005 else ""),
        )
        for row in found
    ]


def _ours(row: SweepRow) -> str:
    """The score over seeds, and the means of what generated texts scored."""
    texts = [f"{TEXT_METRICS[name]} {value:.3g}" for name, value in row.texts.items()]
    return "; ".join([f"{row.score_name} {row.describe()}", *texts])


def _printed(
    table: TrainingTable, format_: str, privacy: Mapping[str, Any], epsilon: float | None
) -> str:
    """What the paper has for the method and budget, by model and metric."""
    title = PUBLISHED[format_].title if format_ in PUBLISHED else ""
    method = privacy.get("method")
    parts = []
    for (model, data, metric), scores in RESULTS[table.name].items():
        if data != title:
            continue
        if method == "non-private":
            value = scores[0]
        elif epsilon in EPSILONS and method in METHODS and _as_printed(privacy):
            value = scores[1:][EPSILONS.index(epsilon)][METHODS.index(method)]
        else:
            continue
        parts.append(f"{model} {metric} {value:g}")
    return "; ".join(parts) or "not printed"


def _as_printed(privacy: Mapping[str, Any]) -> bool:
    """Whether a run is calibrated as the paper's: its own formula, or Rényi DP for baselines.

    Baselines certified by PLD stand beside the printed ones as well: they meet the same ε.
    """
    return privacy.get("method") != "shuffled" or privacy.get("accounting") == "paper"


def _verdict(
    row: SweepRow, rows: Iterable[SweepRow], privacy: Mapping[str, Mapping[str, Any]]
) -> str:
    if row.epsilon is None:
        return "no privacy"
    if row.certified is None:
        return "nothing is proven"
    proven = row.certified <= 1.001 * row.epsilon
    words = "ε is proven" if proven else f"ε = {row.epsilon:g} is claimed, not proven"
    if privacy[row.method].get("accounting") != "paper":
        return words
    honest = [
        other
        for other in rows
        if other.epsilon == row.epsilon and privacy[other.method].get("accounting") != "paper"
    ]
    if not honest:
        return words
    better = max if row.score_name not in ("perplexity",) else min
    best = better(honest, key=lambda other: other.mean)
    beats = better(row.mean, best.mean) == row.mean and row.mean != best.mean
    more = "scores better" if beats else "does not score better"
    return f"{words}; {more} than DP-SGD with a proven ε ({best.describe()})"


def _missing(table: TrainingTable, there: set[str]) -> list[ExhibitRow]:
    titles = {PUBLISHED[format_].title for format_ in there if format_ in PUBLISHED}
    return [
        ExhibitRow(
            what=f"{model} on {data}, {metric}",
            paper=f"non-private {scores[0]:g}; "
            + "; ".join(
                f"ε = {epsilon:g}: "
                + ", ".join(f"{m} {v:g}" for m, v in zip(METHODS, values, strict=True))
                for epsilon, values in zip(EPSILONS, scores[1:], strict=True)
            ),
        )
        for (model, data, metric), scores in RESULTS[table.name].items()
        if data not in titles
    ]
