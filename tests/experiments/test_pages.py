"""Tables of sweeps on pages are those of the committed cells."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from scipy import stats

from shuffled_dpsgd_experiments.frontier.workloads import LESS_NOISE, OPACUS, OURS, PAIRED_SEEDS
from shuffled_dpsgd_experiments.pages import MARKED, NOTHING, part_of, rewritten

ROOT = Path(__file__).parents[2]
PAGES = tuple(f"docs/{name}.md" for name in ("results", "parts", "ingredients", "recipes"))
SWEPT = {path.stem for path in (ROOT / "sweeps").glob("*.toml")}
SWEEP = """
name = "small"
epsilons = [1.0]
seeds = [0, 1]
[run]
task = "digits"
[run.model]
name = "vit-digits"
[run.data]
format = "digits"
[run.privacy]
delta = 1e-4
clip_norm = 1.0
[run.training]
expected_batch_size = 100
epochs = 1
[tuning]
epsilon = 1.0
[tuning.run.training]
epochs = 2
[[methods]]
name = "first"
[methods.run.privacy]
method = "mixopt"
[methods.tuning]
"optimizer.learning_rate" = [0.1, 0.2]
[[methods]]
name = "second"
[methods.run.privacy]
method = "certified"
[methods.tuning]
"optimizer.learning_rate" = [0.1, 0.2]
"""


def record(stage: str, method: str, seed: int, rate: float, score: float) -> dict:
    return {
        "stage": stage,
        "method": method,
        "epsilon": 1.0,
        "seed": seed,
        "tuned": {"optimizer.learning_rate": rate},
        "score_name": "accuracy",
        "score": score,
        "certified": {"epsilon": 0.9},
        "paper": {"epsilon": 1146.2},
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "small.toml").write_text(SWEEP, encoding="utf-8")
    (tmp_path / "results" / "small").mkdir(parents=True)
    return tmp_path


def fill(root: Path) -> None:
    cells = [
        record("tuning", "first", 0, 0.1, 0.25),
        record("tuning", "first", 0, 0.2, 0.5),
        record("main", "first", 0, 0.2, 0.5),
        record("main", "first", 1, 0.2, 0.6),
        record("main", "second", 0, 0.1, 0.75),
        record("main", "second", 1, 0.1, 0.65),
    ]
    for number, cell in enumerate(cells):
        path = root / "results" / "small" / f"{cell['stage']}_{number}.json"
        path.write_text(json.dumps(cell), encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_pages_hold_the_tables_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rewritten(text, ROOT) == text, f"python -m {part_of.__module__} {page}"


PLD, LINEAR = "noise by PLD", "noise by PLD, linear schedule"
AVERAGED, FROZEN = f"{PLD}, weight averaging 0.95", f"{LINEAR}, embeddings frozen"
COLUMNS = [(data, epsilon) for data in ("sst2", "cifar100", "e2e") for epsilon in (1.0, 8.0)]


def difference(data: str, epsilon: float, row: str, other: str) -> str:
    """One score less another as the page prints it, over seeds that have both; nothing if none."""
    scores = {}
    for path in (ROOT / "results" / f"recipe_{data}").glob("main_*.json"):
        cell = json.loads(path.read_text(encoding="utf-8"))
        if cell["epsilon"] == epsilon:
            scores[cell["method"], cell["seed"]] = cell["score"]
    seeds = [seed for method, seed in scores if method == row and (other, seed) in scores]
    if not seeds:
        return ""
    found = statistics.mean(scores[row, seed] - scores[other, seed] for seed in seeds)
    text = f" {found:+.2f}" if data == "e2e" else f" {100 * found:+.1f}"
    return text.replace("-", "−")


@pytest.mark.parametrize(
    ("words", "row", "other"),
    [
        ("linear schedule, against a constant rate", LINEAR, PLD),
        ("linear schedule, against averaged weights", LINEAR, AVERAGED),
        ("averaged weights, against last ones at a constant rate", AVERAGED, PLD),
        ("embeddings frozen, linear schedule, against all weights", FROZEN, LINEAR),
    ],
)
def test_what_stands_behind_the_method_is_what_was_measured(
    words: str, row: str, other: str
) -> None:
    page = (ROOT / "docs/ingredients.md").read_text(encoding="utf-8")
    cells = [difference(data, epsilon, row, other) for data, epsilon in COLUMNS]
    assert f"| {words} |{' |'.join(cells)} |" in page


def test_how_long_the_sweeps_on_a_gpu_took() -> None:
    seconds = 0.0
    for path in (ROOT / "results").glob("*/*_*.json"):
        cell = json.loads(path.read_text(encoding="utf-8"))
        if "sweep" in cell and "digits" not in cell["sweep"] and path.parent.name in SWEPT:
            assert cell["environment"]["hardware"] == "NVIDIA H200"
            seconds += cell["seconds"]["whole"]
    page = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    assert f"took {seconds / 3600:.1f} hours on an H200" in page


def test_every_folder_of_cells_has_a_table() -> None:
    shown = {
        found.group(3)
        for page in PAGES
        for found in MARKED.finditer((ROOT / page).read_text(encoding="utf-8"))
    }
    run = {path.parent.name for path in (ROOT / "results").glob("*/main_*.json")}
    assert run <= shown


def test_the_grid_has_means_over_seeds_and_what_is_proven(root: Path) -> None:
    fill(root)
    lines = part_of("grid", "small", root).splitlines()
    assert lines[0] == "| accuracy at ε = | 1 |"
    assert lines[2] == "| first | 55.0 ± 7.1 |"
    assert lines[5:] == ["| proven ε of second | 0.9 |", "", "2 seeds each."]
    (root / "results" / "small" / "main_5.json").unlink()
    lines = part_of("grid", "small", root).splitlines()
    assert lines[2:4] == ["| first | 55.0 ± 7.1 (2) |", "| second | 75.0 |"]


def test_ingredients_are_compared_with_the_first_seed_by_seed(root: Path) -> None:
    fill(root)
    lines = part_of("ingredients", "small", root).splitlines()
    assert lines[0] == "| what | accuracy, ε = 1 | to the first |"
    assert lines[2] == "| first | 55.0 ± 7.1 |  |"
    assert lines[3] == "| second | 70.0 ± 7.1 | +15.0 ± 127.1 |"
    assert "first row's certified ε (proven) is 0.9" in "".join(lines)


def gains(workload: str, of: str, over: str) -> tuple[int, float, float]:
    """Seeds that two ingredients share, the mean difference in points, and half its interval."""
    rows: dict[str, dict[int, float]] = {}
    path = ROOT / "results" / "frontier" / f"{workload}.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        own = record["algorithm"] == "dp-sgd" and record["epsilon"] == 1.0
        if own and record["stage"] == "figure":
            ingredients = rows.setdefault(record.get("ingredients", ""), {})
            ingredients[record["seed"]] = 100 * record["accuracy"]["test"]
    found = [score - rows[over][seed] for seed, score in rows[of].items() if seed in rows[over]]
    half = stats.t.interval(0.95, len(found) - 1, scale=stats.sem(found))[1]
    return len(found), statistics.mean(found), half


@pytest.mark.parametrize("workload", ["digits", "sst2-features", "sst2-lora"])
def test_ingredients_on_a_workload_are_compared_over_common_seeds(workload: str) -> None:
    seeds, mean, half = gains(workload, LESS_NOISE, OPACUS)
    assert seeds >= PAIRED_SEEDS
    found = part_of("paired", workload, ROOT).splitlines()[3]
    assert found.endswith(f"({seeds}) | +{mean:.1f} ± {half:.1f} |")


def test_what_the_falling_rate_costs_in_short_runs() -> None:
    places = {"digits": "on digits", "sst2-features": "on features", "sst2-lora": "with LoRA"}
    page = " ".join((ROOT / "docs" / "ingredients.md").read_text(encoding="utf-8").split())
    for workload, place in places.items():
        _, mean, half = gains(workload, OURS, LESS_NOISE)
        said = f"{-mean:.1f} ± {half:.1f}"
        assert f"{said} points {place}" in page or f"{said} {place}" in page


def test_how_far_tuning_went_is_counted(root: Path) -> None:
    """Both best rates lie at an end of two, and no row has one seed; the frontier is committed."""
    fill(root)
    (root / "results" / "frontier.json").write_text('{"workloads": {}}', encoding="utf-8")
    assert part_of("effort", "all", root).splitlines()[2] == "| small | 1/1 | 0/2 |"


def test_of_rates_that_tie_the_one_that_was_run_is_counted(root: Path) -> None:
    (root / "results" / "frontier.json").write_text('{"workloads": {}}', encoding="utf-8")
    cells = [record("tuning", "first", 0, rate, 0.5) for rate in (0.1, 0.2, 0.4)]
    for taken, ends in ((0.1, "1/1"), (0.2, "0/1"), (0.4, "1/1")):
        for number, cell in enumerate([*cells, record("main", "first", 0, taken, 0.5)]):
            path = root / "results" / "small" / f"{cell['stage']}_{number}.json"
            path.write_text(json.dumps(cell), encoding="utf-8")
        assert part_of("effort", "all", root).splitlines()[2] == f"| small | {ends} | 1/1 |"


def test_only_what_is_between_marks_changes(root: Path) -> None:
    page = "before\n<!-- grid small: begin -->old<!-- grid small: end -->\nafter"
    found = rewritten(page, root)
    assert found.startswith("before\n<!-- grid small: begin -->\n")
    assert found.endswith("<!-- grid small: end -->\nafter")
    assert NOTHING in found
    assert "old" not in found
