"""Several processes at one sweep: each cell is run once, whoever runs it and whoever dies."""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from experiments.sweeps.test_grid import RAW
from experiments.sweeps.test_running import pretended, sweep_in
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd_experiments.sweeps import SweepProgress, load_sweep, run_sweeps, running
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
from shuffled_dpsgd_experiments.sweeps.grid import Cell, laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.running import ATTEMPTS, _Scheduler
from shuffled_dpsgd_experiments.sweeps.store import Store
from shuffled_dpsgd_experiments.sweeps.workers import CellOutcome, OtherProcess, Worker


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


class Scripted(Worker):
    """A worker that says of each cell what it was told to."""

    def __init__(self, outcomes: dict[str, list[CellOutcome]]) -> None:
        super().__init__(pretended([]))
        self.outcomes, self.began = outcomes, [""]

    def start(self, store: Store, cell: Cell) -> None:
        self.began.append(cell.file_name)
        told = self.outcomes.get(cell.file_name)
        if not told:
            return super().start(store, cell)
        self.at, self.future = (store, cell), Future()
        return self.future.set_result(told.pop(0))


def test_a_cell_that_processes_die_of_is_left_to_another_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(tmp_path)
    cells = list(sweep.main_cells({}))
    died = CellOutcome(kind="failed", why="its process ended with status -9")
    outcomes = {cells[2].file_name: [died, died, died]}
    workers = [Scripted(outcomes), Scripted(outcomes)]
    scheduler = _Scheduler([sweep], workers, lambda progress: None, None, ATTEMPTS)
    with pytest.raises(ShuffledDPError, match=r"^1 cell failed: "):
        scheduler.work()
    began = [name for worker in workers for name in worker.began[1:]]
    assert began.count(cells[2].file_name) == ATTEMPTS
    assert len(began) == len(cells) + 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == ATTEMPTS
    assert all("ε = 8, seed 0: its process ended with status -9" in line for line in lines)
    assert run_sweeps([sweep], run=pretended([]))


def test_a_cell_that_another_command_has_taken_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "POLL_SECONDS", 0.0)
    sweep = sweep_in(tmp_path)
    (first, *_) = sweep.main_cells({})
    worker = Scripted({first.file_name: [CellOutcome(kind="taken"), CellOutcome(kind="taken")]})
    assert _Scheduler([sweep], [worker], lambda progress: None, None).work()
    assert worker.began.count(first.file_name) == 3


def test_a_signal_ends_what_is_running_and_starts_nothing_after_it(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    (first, *_) = sweep.main_cells({})
    worker = Scripted({first.file_name: [CellOutcome(kind="stopped")]})
    assert not _Scheduler([sweep], [worker], lambda progress: None, None).work()
    assert worker.began[1:] == [first.file_name]


def test_a_process_that_ends_is_a_failure_and_the_next_cell_gets_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    cell = next(iter(sweep_in(tmp_path).main_cells({})))
    process = OtherProcess(_end_or_find)
    for score, kind in ((9, "failed"), (1, "found")):
        (tmp_path / "score").write_text(str(score))
        process.start(Store(tmp_path), cell)
        outcome = process.outcome()
        assert outcome.kind == kind, outcome.why
        assert kind == "found" or outcome.why == "its process ended, or was killed"
    process.close()
    assert Store(tmp_path).find(cell) is not None


def _end_or_find(cell: Cell, tasks: Tasks) -> dict[str, Any] | None:
    """Ends its process where the folder says so."""
    score = int((Path(os.environ["TEST_FOLDER"]) / "score").read_text())
    return os._exit(score) if score > 1 else pretended([])(cell, tasks)


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


def test_jobs_are_refused_below_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--jobs"):
        run_sweeps([sweep_in(tmp_path)], jobs=0)


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
        run_sweeps([sweep], jobs=jobs)
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
    assert run_sweeps([sweep], jobs=2, on_progress=seen.append)
    assert [each.done for each in seen] == [1, 2, 3]
    assert all(each.seconds is not None for each in seen)
    again: list[SweepProgress] = []
    assert run_sweeps([sweep], jobs=2, on_progress=again.append)
    assert all(each.seconds is None for each in again)
