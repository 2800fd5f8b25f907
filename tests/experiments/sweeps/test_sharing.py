"""Several commands at one sweep: each cell is run once, whoever runs it and whoever dies."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.sweeps.test_grid import RAW
from experiments.sweeps.test_running import pretended, sweep_in
from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd_experiments.sweeps import load_sweep, run_sweeps
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
from shuffled_dpsgd_experiments.sweeps.grid import Cell, laid_over
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


def test_a_cell_that_another_command_is_at_is_waited_for(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    first, *others = sweep.main_cells({})
    ran: list[str] = []
    done: list[bool] = []
    other = threading.Thread(target=lambda: done.append(run_sweeps([sweep], run=pretended(ran))))
    with Store(tmp_path).claim(first) as mine:
        assert mine
        other.start()
        while len(ran) < len(others):
            assert other.is_alive()
            time.sleep(0.01)
        assert ran == [cell.file_name for cell in others]
    other.join()
    assert (ran[-1], done) == (first.file_name, [True])


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

        assert run_sweeps([sweep], run=run)

    workers = [threading.Thread(target=work, args=(number,)) for number in ran]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    everything = ran[0] + ran[1]
    assert all(ran.values())
    assert len(everything) == len(set(everything)) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(everything)


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_all_others_are_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
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
        run_sweeps([sweep])
    assert len(list(sweep.results.glob("main_certified_*.json"))) == 2
    said = capfd.readouterr().err.splitlines()
    for seed in (0, 1):
        line = f"error: cell failed: bad, ε = 1, seed {seed}: model.train_only: "
        assert sum(each.startswith(line) for each in said) == 1
