"""Several processes at one sweep: each cell is run once, whoever runs it and whoever dies."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from experiments.sweeps.test_grid import RAW
from experiments.sweeps.test_running import pretended, sweep_in
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd_experiments.sweeps import (
    SweepProgress,
    load_sweep,
    run_in_jobs,
    run_sweep,
    run_sweeps,
)
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
from shuffled_dpsgd_experiments.sweeps.failures import CellFailedError
from shuffled_dpsgd_experiments.sweeps.grid import Cell, laid_over
from shuffled_dpsgd_experiments.sweeps.jobs import INCOMPLETE, _Workers
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.store import Store


def test_a_claimed_cell_is_no_one_elses_until_its_owner_is_gone(tmp_path: Path) -> None:
    cell = next(iter(sweep_in(tmp_path).main_cells({})))
    with Store(tmp_path).claim(cell) as first, Store(tmp_path).claim(cell) as second:
        assert (first, second) == (True, False)
    assert not list(tmp_path.iterdir())
    # A process that dies in the middle leaves its file, and no lock on it.
    child = multiprocessing.get_context("fork").Process(
        target=_claim_and_die, args=(cell, tmp_path)
    )
    child.start()
    child.join()
    assert child.exitcode == 9
    assert len(list(tmp_path.iterdir())) == 1
    with Store(tmp_path).claim(cell) as mine:
        assert mine
    store = Store(tmp_path)
    store.add(cell, pretended([])(cell, Tasks()))
    with Store(tmp_path).claim(cell) as mine:
        assert not mine  # It has a result by now.


def _claim_and_die(cell: Cell, folder: Path) -> None:
    with Store(folder).claim(cell) as mine:
        os._exit(9 if mine else 1)


def test_folders_that_a_claim_made_go_with_it_unless_there_is_a_result(tmp_path: Path) -> None:
    cell = next(iter(sweep_in(tmp_path).main_cells({})))
    there, new = tmp_path / "there", tmp_path / "there" / "new" / "results"
    there.mkdir()
    with Store(new).claim(cell) as mine:
        assert mine
    assert not list(there.iterdir())
    with Store(new).claim(cell) as mine:
        assert mine
        Store(new).add(cell, pretended([])(cell, Tasks()))
    assert [path.name for path in new.iterdir()] == [cell.file_name]
    with Store(there).claim(cell) as mine:
        assert mine
    assert there.is_dir()


def test_a_cell_that_processes_die_of_is_left_to_another_call(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    cells = list(sweep.main_cells({}))
    ran: list[str] = []

    def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        if cell.file_name == cells[2].file_name:
            raise RuntimeError("out of memory")
        return pretended(ran)(cell, tasks)

    store = Store(tmp_path)
    for deaths in (1, 2):
        with pytest.raises(CellFailedError, match=r"ε = 8, seed 0: RuntimeError: out of memory"):
            run_sweeps([sweep], is_replaced=True, run=run)
        assert store.deaths(cells[2]) == deaths
    assert ran == [cell.file_name for cell in cells[:2]]
    assert not run_sweeps([sweep], is_replaced=True, run=run)  # All but that one.
    assert len(ran) == len(cells) - 1
    store.forget_deaths()
    assert store.deaths(cells[2]) == 0
    assert run_sweeps([sweep], is_replaced=True, run=pretended(ran))
    assert ran[-1] == cells[2].file_name
    assert not list(tmp_path.glob(".*"))


def test_a_claim_that_is_held_is_no_death(tmp_path: Path) -> None:
    cell = next(iter(sweep_in(tmp_path).main_cells({})))
    with Store(tmp_path).claim(cell) as mine:
        assert mine
        Store(tmp_path).forget_deaths()
        assert Store(tmp_path).deaths(cell) == 0
        with Store(tmp_path).claim(cell) as second:
            assert not second


def test_a_process_that_failed_is_replaced_while_there_are_new_results() -> None:
    workers = _Workers([sys.executable, "-S", "-c", "raise SystemExit(7)"], 2, stop_after=None)
    started, results = 2, 0
    while workers.running:
        before = len(workers.running)
        for worker in workers.running:
            worker.wait()
        results = min(results + 1, 2)
        workers.replace_failed(results)
        started += len(workers.running)
        assert len(workers.running) <= before
    # Two rounds with a new result each, then as many replacements as jobs in vain.
    assert started == len(workers.failed) == 6
    assert set(workers.failed) == {7}


def test_processes_that_end_as_asked_are_not_replaced() -> None:
    workers = _Workers([sys.executable, "-S", "-c", f"raise SystemExit({INCOMPLETE})"], 2, None)
    for worker in workers.running:
        worker.wait()
    workers.replace_failed(0)
    assert workers.running == []
    assert workers.failed == []


def test_workers_share_the_cells_and_wait_for_the_trials_of_a_method(tmp_path: Path) -> None:
    raw = laid_over(copy.deepcopy(RAW), {"tuning": {"epsilon": 1.0, "run": {}}})
    for method in raw["methods"]:
        method["tuning"] = {"optimizer.learning_rate": [1e-3, 1e-2]}
    sweep = parse_sweep(raw, results=tmp_path)
    # The first cells of both workers are under way at once, so neither can do all.
    meet = threading.Barrier(2)
    ran: dict[int, list[str]] = {0: [], 1: []}

    def work(number: int) -> None:
        def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
            if not ran[number]:
                meet.wait(timeout=10)
            return pretended(ran[number])(cell, tasks)

        assert run_sweep(sweep, run=run)

    workers = [threading.Thread(target=work, args=(number,)) for number in ran]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    everything = ran[0] + ran[1]
    assert all(ran.values())
    assert len(everything) == len(set(everything)) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(everything)


def test_jobs_are_refused_below_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--jobs"):
        run_in_jobs([sweep_in(tmp_path)], [tmp_path / "absent.toml"], 0)


@pytest.mark.slow
def test_the_failure_of_processes_is_told(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    with pytest.raises(ShuffledDPError, match="4 processes failed"):
        run_in_jobs([sweep], [tmp_path / "absent.toml"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_that_fails_is_named_and_all_others_are_run(
    tmp_path: Path, jobs: int, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "sweep.toml"
    file.write_text(
        'name = "f"\nepsilons = [1.0]\nseeds = [0, 1]\n[run]\ntask = "digits"\n'
        'model.name = "vit-digits"\ndata.format = "digits"\nprivacy.delta = 1e-4\n'
        "privacy.clip_norm = 1.0\ntraining.expected_batch_size = 480\ntraining.num_steps = 2\n"
        '[[methods]]\nname = "bad"\nrun.model.train_only = ["nothing"]\n'
        '[[methods]]\nname = "certified"\nrun.privacy.method = "certified"\n'
    )
    sweep = load_sweep(file, results=tmp_path / "results")
    with pytest.raises(ShuffledDPError, match=r"2 cells failed: bad, ε = 1, seed 0; bad, ε = 1, "):
        run_in_jobs([sweep], [file], jobs, results=sweep.results)
    assert len(list(sweep.results.glob("main_certified_*.json"))) == 2
    said = capfd.readouterr().err.splitlines()
    for seed in (0, 1):
        line = f"error: cell failed: bad, ε = 1, seed {seed}: model.train_only: "
        # Several processes try each cell twice, in a fresh one.
        assert sum(each.startswith(line) for each in said) == jobs


@pytest.mark.slow
def test_processes_run_a_sweep_together(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "sweep.toml"
    file.write_text(
        'name = "j"\nepsilons = [1.0]\nseeds = [0, 1, 2]\n[run]\ntask = "digits"\n'
        'model.name = "vit-digits"\ndata.format = "digits"\nprivacy.delta = 1e-4\n'
        "privacy.clip_norm = 1.0\ntraining.expected_batch_size = 480\ntraining.num_steps = 2\n"
        '[[methods]]\nname = "certified"\nrun.privacy.method = "certified"\n'
    )
    sweep = load_sweep(file, results=tmp_path / "results")
    seen: list[SweepProgress] = []
    assert run_in_jobs([sweep], [file], 2, results=sweep.results, on_progress=seen.append)
    assert [each.done for each in seen] == [1, 2, 3]
    assert all(each.seconds is not None for each in seen)
    again: list[SweepProgress] = []
    assert run_in_jobs([sweep], [file], 2, results=sweep.results, on_progress=again.append)
    assert all(each.seconds is None for each in again)
