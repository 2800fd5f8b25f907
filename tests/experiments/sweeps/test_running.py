"""A sweep runs what is missing and nothing twice, however it was stopped."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.sweeps.test_grid import RAW
from shuffled_dpsgd.errors import CheckpointError, ShuffledDPError
from shuffled_dpsgd.tasks import RunConfig, build_task
from shuffled_dpsgd_experiments.sweeps import (
    Sweep,
    SweepProgress,
    run_sweeps,
    table_of,
)
from shuffled_dpsgd_experiments.sweeps import cell as cell_module
from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.grid import Cell, laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.running import choose, merit
from shuffled_dpsgd_experiments.sweeps.store import Store
from shuffled_dpsgd_experiments.sweeps.table import rows_of


class Killed(BaseException):
    """Stands for a kill: nobody catches it."""


def sweep_in(folder: Path, **changes: Any) -> Sweep:
    return parse_sweep(laid_over(RAW, changes), results=folder)


def pretended(
    ran: list[str], *, killed_at: int | None = None
) -> Callable[[Cell, Tasks], dict[str, Any]]:
    """Cells that take no time; the one numbered `killed_at` ends the process."""

    def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        if killed_at is not None and len(ran) == killed_at:
            raise Killed
        ran.append(cell.file_name)
        return {
            "method": cell.method,
            "epsilon": cell.epsilon,
            "seed": cell.seed,
            "tuned": dict(cell.tuned),
            "score_name": "accuracy",
            "score": 0.5 + 0.01 * cell.seed,
            "certified": None if cell.epsilon is None else {"epsilon": 2 * cell.epsilon},
            "paper": None,
        }

    return run


@pytest.mark.parametrize("killed_at", range(6))
def test_a_killed_sweep_repeats_nothing_and_loses_nothing(tmp_path: Path, killed_at: int) -> None:
    sweep = sweep_in(tmp_path)
    first: list[str] = []
    with pytest.raises(Killed):
        run_sweeps([sweep], run=pretended(first, killed_at=killed_at))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == sorted(first)
    second: list[str] = []
    assert run_sweeps([sweep], run=pretended(second))
    names = [cell.file_name for cell in sweep.main_cells({})]
    assert first + second == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).read_bytes() == kept for name, kept in before.items())
    third: list[str] = []
    assert run_sweeps([sweep], run=pretended(third))
    assert third == []


def test_a_cell_that_raises_is_named_and_stepped_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(tmp_path)
    bad = list(sweep.main_cells({}))[2]
    ran: list[str] = []

    def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        if cell.file_name == bad.file_name:
            raise RuntimeError("out of\nmemory")
        return pretended(ran)(cell, tasks)

    for once_more in (False, True):
        with pytest.raises(ShuffledDPError, match=f"^1 cell failed: {re.escape(bad.describe())}. "):
            run_sweeps([sweep], run=run)
        assert len(ran) == 5, once_more
        (line,) = capsys.readouterr().err.splitlines()
        expected = f"error: cell failed: {bad.describe()}: RuntimeError: out of memory ("
        assert line.startswith(f"{expected}test_running.py:")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ran)
    assert run_sweeps([sweep], run=pretended(ran))
    assert ran[-1] == bad.file_name


def test_a_trial_that_raises_keeps_back_no_other_method(tmp_path: Path) -> None:
    raw = laid_over(copy.deepcopy(RAW), {"tuning": {"epsilon": 1.0, "run": {}}})
    for method in raw["methods"]:
        method["tuning"] = {"optimizer.learning_rate": [1e-3, 1e-2]}
    sweep = parse_sweep(raw, results=tmp_path)
    bad = sweep.tuning_cells()[0]
    ran: list[str] = []

    def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        if cell.file_name == bad.file_name:
            raise RuntimeError
        return pretended(ran)(cell, tasks)

    with pytest.raises(ShuffledDPError, match=r"^1 cell failed: tuning plain"):
        run_sweeps([sweep], run=run)
    stages = [name.split("_")[0] for name in ran]
    # No value was chosen for the method whose trial is missing, and so its grid is not run.
    grid = [cell for cell in sweep.main_cells({}) if cell.method != bad.method]
    assert (stages.count("tuning"), stages.count("main")) == (3, len(grid))


def test_what_all_cells_need_ends_the_sweep_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def without_data(config: RunConfig) -> None:
        tried.append(config)
        raise ConnectionError("no hub")

    monkeypatch.setattr(cell_module, "build_task", without_data)
    with pytest.raises(ShuffledDPError, match=r"^ConnectionError: no hub \(test_running"):
        run_sweeps([sweep_in(tmp_path)])
    assert len(tried) == 1
    assert capsys.readouterr().err == ""
    # Of one method only: it is stepped over, and its data are asked for once.
    methods = copy.deepcopy(RAW["methods"])
    methods[1]["run"]["model"] = {"lora_rank": 2}
    sweep = sweep_in(tmp_path, methods=methods)

    def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        if cell.method == methods[1]["name"]:
            tasks.of(cell.config)
        return pretended([])(cell, tasks)

    with pytest.raises(ShuffledDPError, match=r"^4 cells failed: "):
        run_sweeps([sweep], run=run)
    assert len(tried) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all("ConnectionError: no hub (test_running.py:" in line for line in lines)


def test_progress_is_that_of_the_whole_grid(tmp_path: Path) -> None:
    seen: list[SweepProgress] = []
    run_sweeps([sweep_in(tmp_path)], on_progress=seen.append, run=pretended([]))
    assert [(each.done, each.total) for each in seen] == [(i, 6) for i in range(1, 7)]
    assert "cell 6 of 6: shuffled, c' = 10c, ε = 8, seed 1: accuracy 0.51" in seen[-1].describe()


def test_no_cell_starts_when_time_is_up(tmp_path: Path) -> None:
    assert not run_sweeps([sweep_in(tmp_path)], stop_after=0.0, run=pretended([]))
    assert not list(tmp_path.iterdir())


def test_a_signal_leaves_no_half_result(tmp_path: Path) -> None:
    assert not run_sweeps([sweep_in(tmp_path)], run=lambda cell, tasks: None)
    assert not list(tmp_path.iterdir())


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    cell = next(iter(sweep_in(tmp_path).main_cells({})))
    store = Store(tmp_path)
    path = store.add(cell, {"score": 1.0})
    with pytest.raises(CheckpointError, match="never overwritten"):
        store.add(cell, {"score": 2.0})
    assert json.loads(path.read_text()) == {"score": 1.0}
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    path.write_text("{")
    with pytest.raises(CheckpointError, match="Move it away"):
        store.find(cell)


def test_the_best_trial_is_chosen_and_perplexity_is_better_when_lower() -> None:
    raw = laid_over(copy.deepcopy(RAW), {"tuning": {"epsilon": 1.0, "run": {}}})
    for method in raw["methods"]:
        method["tuning"] = {"optimizer.learning_rate": [1e-3, 1e-2, 1e-1]}
    cells = parse_sweep(raw).tuning_cells()
    scores = [0.2, 0.9, 0.9, 0.1, None, 0.3]
    records = [{"score": score, "score_name": "accuracy"} for score in scores]
    chosen = choose(zip(cells, records, strict=True))
    assert [each["optimizer.learning_rate"] for each in chosen.values()] == [1e-2, 1e-1]
    assert merit({"score": 8.0, "score_name": "perplexity"}) > merit(
        {"score": 9.0, "score_name": "perplexity"}
    )


def test_the_table_has_mean_and_spread_beside_what_is_proven(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    run_sweeps([sweep], run=pretended([]))
    table = table_of(sweep)
    assert "| – | plain | 50.5 ± 0.7 (n = 2) | none | – |" in table
    assert "| 8 | shuffled, c' = 10c | 50.5 ± 0.7 (n = 2) | 16 | – |" in table
    (entry,) = rows_of([{**record(0.25), "seed": 0}])
    assert entry.spread is None
    assert entry.describe() == "25.0 (n = 1)"


def record(score: float) -> dict[str, Any]:
    names: dict[str, Any] = {"method": "m", "epsilon": 1.0, "score_name": "accuracy"}
    return {**names, "score": score, "certified": None, "paper": None}


@pytest.mark.slow
def test_a_cell_trains_and_says_what_is_claimed(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    tasks = Tasks()
    cells = list(sweep_in(tmp_path).main_cells({}))[:2]
    plain, shuffled = (run_cell(cell, tasks) for cell in cells)
    assert plain is not None
    assert shuffled is not None
    assert plain["certified"] is None
    assert plain["steps_taken"] == 2
    assert plain["samples_without_finite_gradient"] == 0
    assert shuffled["paper"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert shuffled["certified"]["kind"] == "proven"
    assert [block["name"] for block in shuffled["blocks"]] == ["shuffled", "rest"]
    assert 0.0 <= shuffled["score"] <= 1.0
    assert run_cell(cells[1], tasks)["score"] == shuffled["score"]  # type: ignore[index]
    assert tasks.of(cells[0].config) is tasks.of(cells[1].config)


def test_samples_without_a_finite_gradient_are_counted_over_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")

    def without_training(*given: Any) -> Any:
        for number in (3, 0, 2):
            metrics = SimpleNamespace(num_nonfinite=number, loss=1.0)
            for callback in given[-1]:
                callback(SimpleNamespace(metrics=metrics))
        given[2].close()
        return SimpleNamespace(finished=True, steps_taken=3)

    monkeypatch.setattr(cell_module, "train_on", without_training)
    found = run_cell(next(iter(sweep_in(tmp_path).main_cells({}))), Tasks())
    assert found is not None
    assert found["samples_without_finite_gradient"] == 5


@pytest.mark.slow
def test_a_cell_finds_the_same_whatever_was_run_before_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plain, first, *_, last = sweep_in(tmp_path).main_cells({})
    after = Tasks()
    in_a_row = [run_cell(cell, after) for cell in (plain, last, first)]
    for cell, found in zip((last, first), in_a_row[1:], strict=True):
        alone = run_cell(cell, Tasks())
        assert alone is not None
        assert found is not None
        assert list(alone) == list(found)
        alone.pop("seconds")
        found.pop("seconds")
        assert alone == found


@pytest.mark.slow
def test_a_cell_finds_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    cells = list(sweep_in(tmp_path).main_cells({}))
    tasks = Tasks()
    last = [run_cell(cell, tasks) for cell in cells][-1]
    code = (
        "import json, pickle, sys\n"
        "from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell\n"
        "print(json.dumps(run_cell(pickle.load(sys.stdin.buffer), Tasks())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(cells[-1]), capture_output=True, check=True
    )
    alone = json.loads(done.stdout)
    alone.pop("seconds")
    last.pop("seconds")  # type: ignore[union-attr]
    assert alone == json.loads(json.dumps(last))


def test_seeds_share_data_and_have_weights_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    configs = {cell.seed: cell.config for cell in sweep_in(tmp_path).main_cells({})}
    tasks = Tasks()
    zero, one = tasks.of(configs[0]), tasks.of(configs[1])
    assert one.train_data is zero.train_data
    for seed, task in ((0, zero), (1, one)):
        fresh = build_task(configs[seed]).model.state_dict()
        assert all(torch.equal(value, fresh[key]) for key, value in task.model.state_dict().items())
    assert not torch.equal(*(next(task.model.parameters()) for task in (zero, one)))
    first, second = (Tasks(kept=1).of(configs[0]) for _ in range(2))
    assert first is not second


def test_cells_of_a_later_sweep_come_after_those_of_an_earlier_one(tmp_path: Path) -> None:
    first, second = sweep_in(tmp_path / "a"), sweep_in(tmp_path / "b", name="other")
    ran: list[str] = []
    seen: list[SweepProgress] = []
    assert run_sweeps([first, second], run=pretended(ran), on_progress=seen.append)
    both = [cell.file_name for sweep in (first, second) for cell in sweep.main_cells({})]
    assert ran == both
    assert [(each.done, each.total) for each in seen] == [(i, 12) for i in range(1, 13)]
    assert [each.cell.sweep for each in seen] == 6 * [first.name] + 6 * ["other"]


def test_texts_are_scored_in_the_grid_and_not_while_tuning(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    for name in ("trainset", "devset"):
        lines = [f"food[{i % 3}],It serves {i % 3} here." for i in range(24)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["mr,ref", *lines]) + "\n")
    raw = copy.deepcopy(RAW) | {
        "seeds": [0],
        "methods": [{**RAW["methods"][0], "tuning": {"optimizer.learning_rate": [1e-3]}}],
        "tuning": {"run": {"data": {"heldout_from_train": 4}}},
    }
    raw["run"] = laid_over(
        raw["run"],
        {
            "task": "causal-lm",
            "model": {"name": "gpt2-tiny"},
            "data": {"format": "e2e", "path": str(tmp_path), "max_length": 64},
            "training": {"expected_batch_size": 12, "num_steps": 1},
            "generation": {"max_new_tokens": 4, "bleu": "plain"},
        },
    )
    sweep = parse_sweep(raw, results=tmp_path / "results")
    assert run_sweeps([sweep])
    results = tmp_path / "results"
    (main,), (trial,) = (list(results.glob(f"{stage}_*.json")) for stage in ("main", "tuning"))
    assert json.loads(main.read_text())["generation"]["num_prompts"] == 3
    assert "generation" not in json.loads(trial.read_text())
    assert "BLEU" in table_of(sweep)


@pytest.mark.slow
def test_a_process_killed_in_the_middle_resumes(tmp_path: Path) -> None:
    """The whole command, killed by the system while it trains."""
    file = tmp_path / "sweep.toml"
    file.write_text(
        'name = "k"\nepsilons = [1.0]\nseeds = [0, 1, 2]\n[run]\ntask = "digits"\n'
        'model.name = "vit-digits"\ndata.format = "digits"\nprivacy.delta = 1e-4\n'
        "privacy.clip_norm = 1.0\ntraining.expected_batch_size = 480\ntraining.num_steps = 20\n"
        '[[methods]]\nname = "certified"\nrun.privacy.method = "certified"\n'
    )
    command = [sys.executable, "-m", "shuffled_dpsgd", "sweep", str(file)]
    command += ["--results", str(tmp_path / "results")]
    process = subprocess.Popen(command, env=os.environ.copy())
    results = tmp_path / "results"
    while not list(results.glob("main_*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path.name: path.read_bytes() for path in results.glob("main_*.json")}
    assert 1 <= len(kept) < 3
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "n = 3" in done.stdout
    assert done.stderr.count("there already") == len(kept)
    assert all((results / name).read_bytes() == content for name, content in kept.items())
