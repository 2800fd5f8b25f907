"""A sweep's cells: how many, in which order, by which names, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.sweeps import grid, load_sweep
from shuffled_dpsgd_experiments.sweeps.grid import laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep

ROOT = Path(__file__).parents[3]
RAW: dict[str, Any] = {
    "name": "small",
    "epsilons": [1.0, 8.0],
    "seeds": [0, 1],
    "run": {
        "task": "digits",
        "model": {"name": "vit-digits"},
        "data": {"format": "digits"},
        "privacy": {"delta": 1e-4},
        "training": {"expected_batch_size": 480, "num_steps": 2, "physical_batch_size": 600},
    },
    "methods": [
        {"name": "plain", "epsilons": [], "run": {"privacy": {"method": "non-private"}}},
        {
            "name": "shuffled, c' = 10c",
            "batch_clip_ratio": 10,
            "run": {"privacy": {"method": "shuffled", "clip_norm": 0.5}},
        },
    ],
}


def changed(**changes: Any) -> dict[str, Any]:
    return laid_over(copy.deepcopy(RAW), changes)


def test_every_budget_and_seed_is_a_cell_and_the_first_seed_comes_first() -> None:
    cells = list(parse_sweep(RAW).main_cells({}))
    assert [(cell.method, cell.epsilon, cell.seed) for cell in cells] == [
        (method, epsilon, seed)
        for seed in (0, 1)
        for method, epsilon in (
            ("plain", None),
            ("shuffled, c' = 10c", 1.0),
            ("shuffled, c' = 10c", 8.0),
        )
    ]
    assert len({cell.file_name for cell in cells}) == len(cells)
    shuffled = cells[1].config.privacy
    assert (shuffled.batch_clip_norm, shuffled.epsilon) == (5.0, 1.0)


def test_a_cell_is_known_by_what_decides_its_result_and_by_nothing_else() -> None:
    first = next(iter(parse_sweep(RAW).main_cells({})))
    elsewhere = laid_over(RAW, {"run": {"training": {"num_threads": 1, "device": "cpu"}}})
    spelt_out = laid_over(RAW, {"run": {"training": {"precision": "float32"}}})
    assert next(iter(parse_sweep(spelt_out).main_cells({}))).file_name == first.file_name
    longer = laid_over(RAW, {"run": {"training": {"num_steps": 3}}})
    assert next(iter(parse_sweep(elsewhere).main_cells({}))).file_name == first.file_name
    assert next(iter(parse_sweep(longer).main_cells({}))).file_name != first.file_name


def test_a_folder_leaves_no_trace_of_where_it_is(tmp_path: Path) -> None:
    run = {
        "task": "text-classification",
        "model": {"name": "bert-tiny"},
        "data": {"format": "sst2", "path": str(tmp_path / "sst2")},
    }
    cell = next(iter(parse_sweep(laid_over(RAW, {"run": run})).main_cells({})))
    assert str(tmp_path) not in str(cell.described)
    assert cell.identity["data"]["name"] == "sst2 (sst2)"


def test_tuning_tries_every_combination_at_one_budget() -> None:
    raw = changed(tuning={"epsilon": 1.0, "run": {"training": {"num_steps": 1}}})
    raw["methods"][0]["tuning"] = {"optimizer.learning_rate": [1e-3, 1e-2]}
    raw["methods"][1]["tuning"] = {"privacy.clip_norm": [0.1, 1.0]}
    sweep = parse_sweep(raw)
    cells = sweep.tuning_cells()
    assert [cell.tuned for cell in cells] == [
        {"optimizer.learning_rate": 1e-3},
        {"optimizer.learning_rate": 1e-2},
        {"privacy.clip_norm": 0.1},
        {"privacy.clip_norm": 1.0},
    ]
    assert cells[3].config.privacy.batch_clip_norm == 10.0  # The ratio follows the clip.
    assert {cell.epsilon for cell in cells} == {None, 1.0}
    assert all(cell.config.training.num_steps == 1 for cell in cells)
    chosen = {"plain": {"optimizer.learning_rate": 1e-2}}
    main = next(iter(sweep.main_cells(chosen)))
    assert main.config.optimizer.learning_rate == 1e-2
    assert main.config.training.num_steps == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seed": [1]}, "did you mean `seeds`"),
        ({"seeds": []}, "at least one seed"),
        ({"epsilons": 1.0}, "epsilons"),
        ({"methods": [RAW["methods"][0]] * 2}, "different names"),
        ({"methods": [{"name": "a", "runs": {}}]}, "did you mean `run`"),
        ({"methods": [{"name": "a", "tuning": {"x": [1]}}]}, "tuning.run"),
        ({"run": {"generation": {"num_beams": 2}}}, "causal-lm"),
        ({"run": {"training": {"epochs": 2}}}, "exactly one of epochs"),
        ({"run": {"privacy": {"epsilom": 2}}}, "did you mean `epsilon`"),
        ({"epsilons": ["a"]}, "epsilons: expected a number, got 'a'"),
        ({"epsilons": [1.0, 1]}, "epsilons: expected each once"),
        ({"seeds": [0, 0]}, "seeds: expected each once"),
        ({"results": 3}, "results: expected a text"),
        ({"tuning": 3}, "tuning: expected a table"),
        ({"methods": [3]}, "methods.0.: expected a table"),
        ({"methods": [{"name": "a", "run": 3}]}, "methods.run: expected a table"),
        ({"methods": [{"name": "a", "epsilons": [3.0]}]}, "some of the sweep's .1.0, 8.0."),
        ({"methods": [{"name": "a", "epsilons": "all"}]}, "methods.epsilons: expected a list"),
        ({"methods": [{"name": "a", "batch_clip_ratio": "x"}]}, "batch_clip_ratio: expected a num"),
        ({"methods": [{"name": "a", "tuning": {"x.y": 1}}]}, "tuning.x.y: expected a list"),
        (
            {"methods": [{"name": "a", "tuning": {"x.y": [1]}}], "tuning": {"run": {}}},
            "tuning.epsilon",
        ),
        ({"run": {"privacy": 3}}, "privacy.delta"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        parse_sweep(changed(**changes))


def test_folders_of_methods_are_relative_to_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    (tmp_path / "sweep.toml").write_text(
        """
        name = "x"
        epsilons = [1.0]
        seeds = [0]
        [run]
        task = "text-classification"
        model.name = "bert-tiny"
        data = {format = "sst2", path = "data"}
        privacy = {delta = 1e-5, clip_norm = 1.0}
        training = {expected_batch_size = 4, num_steps = 1}
        [[methods]]
        name = "other model"
        run.model.name = "models/mine"
        run.data.path = "other"
        """
    )
    (cell,) = load_sweep(tmp_path / "sweep.toml").main_cells({})
    assert cell.config.model.name == str(tmp_path / "models" / "mine")
    assert cell.config.data.path == str(tmp_path / "other")


def test_unequal_effort_is_refused() -> None:
    raw = changed(tuning={"epsilon": 1.0, "run": {}})
    raw["methods"][0]["tuning"] = {"optimizer.learning_rate": [1e-3, 1e-2]}
    with pytest.raises(InvalidArgumentError, match="equal effort"):
        parse_sweep(raw)


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda p: p.stem)
def test_sweep_files_parse(path: Path) -> None:
    assert list(load_sweep(path).main_cells({}))


def test_a_name_changes_with_the_noise_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (next(iter(parse_sweep(RAW).main_cells({}))) for _ in range(2))
    assert first.file_name != first.older_name
    monkeypatch.setattr(grid, "STREAM_VERSION", grid.STREAM_VERSION + 1)
    assert other.file_name != first.file_name
    assert other.older_name == first.older_name
