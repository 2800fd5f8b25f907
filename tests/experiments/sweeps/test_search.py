"""Searches: as many runs as were drawn beforehand, the best one kept, the right price."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.sweeps.test_grid import RAW
from shuffled_dpsgd.accounting import BestOf, claim_together
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import RunConfig
from shuffled_dpsgd.training.budget import BudgetFile
from shuffled_dpsgd_experiments.sweeps import cell as cell_module
from shuffled_dpsgd_experiments.sweeps import run_sweeps, table_of
from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.grid import Cell, laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.search import run_search

METHOD = {
    "name": "certified",
    "run": {"privacy": {"method": "certified", "clip_norm": 1.0}},
    "tuning": {"optimizer.learning_rate": [1e-3, 1e-2, 1e-1]},
}
SEARCH = laid_over(
    RAW, {"methods": [METHOD], "tuning": {"best_of": 10}, "epsilons": [3.0], "seeds": [0]}
)
TASK: Any = SimpleNamespace(score_name="accuracy", train_data=[(number, 0) for number in range(40)])


def searches(**changes: Any) -> list[Cell]:
    return list(parse_sweep(laid_over(SEARCH, changes)).main_cells({}))


def plan(noise: float = 2.0) -> PrivacyPlan:
    block = NoiseBlock(name="rest", parameters=("a",), dimension=3, noise_multiplier=noise)
    return PrivacyPlan(
        dataset_size=40,
        expected_batch_size=10,
        num_steps=3,
        delta=1e-5,
        clip_norm=1.0,
        blocks=(block,),
    )


def searched(cell: Cell, trained: list[Cell], **plans: Any) -> dict[str, Any]:
    def train(chosen: Cell) -> dict[str, Any]:
        trained.append(chosen)
        rate = chosen.config.optimizer.learning_rate
        score = -abs(np.log10(rate) + 2.0)  # 0.01 is best
        return {"score": score, "score_name": "accuracy", "tuned": dict(chosen.tuned), "steps": 3}

    found = run_search(cell, TASK, plan_of=plans.get("plan_of", lambda each: plan()), train=train)
    assert found is not None
    return found


def test_the_number_of_runs_is_drawn_as_priced_and_the_best_is_kept() -> None:
    (cell,) = searches()
    numbers, claim = [], claim_together([BestOf(run=plan().mechanism(), mean=10.0)], 1e-5)
    for _ in range(300):
        trained: list[Cell] = []
        found = searched(cell, trained)
        numbers.append(len(trained))
        rates = [each.config.optimizer.learning_rate for each in trained]
        if trained:  # a Poisson draw may be zero
            assert found["tuned"]["optimizer.learning_rate"] == 1e-2 or 1e-2 not in rates
        assert found["certified"]["epsilon"] == claim.epsilon
        assert found["certified"]["kind"] == "proven"
        assert "10" not in json.dumps({**found, "best_of": 0, "config": {}, "assumptions": []})
    assert np.mean(numbers) == pytest.approx(10.0, abs=4 * np.sqrt(10.0 / 300))
    assert np.var(numbers) == pytest.approx(10.0, rel=0.35)


def test_every_candidate_is_as_likely_as_the_others() -> None:
    (cell,) = searches()
    trained: list[Cell] = []
    for _ in range(100):
        searched(cell, trained)
    counts = [sum(each == one for each in trained) for one in cell.candidates]
    assert len(counts) == 3
    assert min(counts) > len(trained) / 3 - 5 * np.sqrt(len(trained))


def test_no_run_at_all_is_an_answer() -> None:
    (cell,) = searches(tuning={"best_of": 1.0})
    found = next(
        record for _ in range(200) if (record := searched(cell, trained := [])) and not trained
    )
    assert found["score"] is None
    assert found["certified"]["epsilon"] > 0.0
    assert found["config"]["best_of"] == 1.0


def test_a_search_counts_once_and_says_nothing_of_its_number(tmp_path: Path) -> None:
    file = BudgetFile(tmp_path / "b.json")
    file.create(delta=1e-5, epsilon=None, adjacency="add-remove")
    (cell,) = searches(run={"privacy": {"budget": str(file.path)}})
    assert cell.file_name == searches()[0].file_name
    for _ in range(2):
        searched(cell, [])
    found = file.read()
    assert [each.best_of for each in found.runs] == [10.0, 10.0]
    assert {each.ending for each in found.runs} == {"counted as a whole"}
    search = BestOf(run=plan().mechanism(), mean=10.0)
    assert found.together() == claim_together([search] * 2, 1e-5)


@pytest.mark.slow
def test_runs_that_are_counted_together_follow_no_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BudgetFile(tmp_path / "b.json")
    file.create(delta=1e-5, epsilon=None, adjacency="add-remove")
    seen: list[RunConfig] = []
    original = cell_module.start_private

    def start(config: RunConfig, *arguments: Any, **options: Any) -> Any:
        seen.append(config)
        return original(config, *arguments, **options)

    monkeypatch.setattr(cell_module, "start_private", start)
    plain = searches(tuning={"best_of": 3}, run={"model": {"name": "linear-digits"}})[0]
    for budget in (None, str(file.path)):
        privacy = replace(plain.config.privacy, budget=budget)
        counted = replace(plain, config=replace(plain.config, privacy=privacy))
        run_cell(replace(counted, best_of=None), Tasks())
    assert [(config.seed, config.privacy.budget) for config in seen] == [
        (0, None),
        (None, str(file.path)),
    ]
    assert len(file.read().runs) == 1
    seen.clear()
    run_cell(counted, Tasks())
    assert len(seen) >= 3  # Every candidate is priced.
    assert {(config.seed, config.privacy.budget) for config in seen} == {(None, None)}
    assert [each.best_of for each in file.read().runs] == [None, 3.0]


def test_every_try_of_a_tuning_counts(tmp_path: Path) -> None:
    file = BudgetFile(tmp_path / "b.json")
    file.create(delta=1e-4, epsilon=None, adjacency="add-remove")
    tried = {**METHOD, "tuning": {"optimizer.learning_rate": [1e-2]}}
    changes = {"tuning": {"epsilon": 1.0, "run": {}}, "methods": [tried]}
    linear = {"run": {"model": {"name": "linear-digits"}}}
    sweep = parse_sweep(laid_over(laid_over(RAW, changes), linear), budget=file.path)
    (each,) = sweep.tuning_cells()
    run_cell(each, Tasks())
    assert [run.ending for run in file.read().runs] == ["finished"]


def test_runs_of_another_price_are_refused_before_any_is_trained() -> None:
    (cell,) = searches()
    trained: list[Cell] = []
    with pytest.raises(InvalidArgumentError, match="same noise, sampling probability and steps"):
        searched(
            cell, trained, plan_of=lambda each: plan(2.0 + each.config.optimizer.learning_rate)
        )
    with pytest.raises(InvalidArgumentError, match="can be certified"):
        searched(cell, trained, plan_of=lambda each: plan(0.0))
    assert trained == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tuning": {"best_of": 10, "epsilon": 1.0}}, "nothing beside best_of"),
        ({"methods": [{**METHOD, "tuning": {}}]}, "a tuning table"),
        ({"methods": [{**METHOD, "epsilons": []}]}, "a budget and a tuning"),
    ],
)
def test_what_a_search_cannot_be_is_refused_on_reading(changes: Any, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        parse_sweep({**SEARCH, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "privacy.budget: expected nothing with method"),
        (
            {
                "methods": [METHOD],
                "tuning": {"epsilon": 1.0, "run": {"data": {"heldout_from_train": 9}}},
            },
            "0 under a budget",
        ),
    ],
)
def test_what_no_budget_covers_is_refused_on_reading(changes: Any, named: str) -> None:
    images = {"task": "image-classification", "data": {"format": "cifar10", "path": "."}}
    run = laid_over(RAW["run"], images, {"privacy": {"budget": "b.json"}})
    with pytest.raises(InvalidArgumentError, match=named):
        parse_sweep({**RAW, "run": run, **changes})


@pytest.mark.slow
def test_a_search_is_one_result_with_its_own_price(tmp_path: Path) -> None:
    linear = {"model": {"name": "linear-digits"}}
    raw = laid_over(SEARCH, {"tuning": {"best_of": 1.5}, "run": linear})
    raw["methods"] = [{**METHOD, "tuning": {"optimizer.learning_rate": [1e-2]}}]
    sweep = parse_sweep(raw, results=tmp_path)
    assert run_sweeps([sweep])
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert record["best_of"] == 1.5
    assert record["paper"] is None
    assert record["certified"]["epsilon"] > 3.0
    assert f"| {record['certified']['epsilon']:.3g} |" in table_of(sweep)
