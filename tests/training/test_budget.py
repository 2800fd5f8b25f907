"""A budget file: every run counts before its first release, whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.independent import true_epsilon_together
from shuffled_dpsgd.accounting import Filter, SampledGaussian, claim_together
from shuffled_dpsgd.errors import BudgetExhaustedError, CheckpointError, InvalidArgumentError
from shuffled_dpsgd.training import PrivateTraining, load_checkpoint, make_private, save_checkpoint
from shuffled_dpsgd.training.budget import BudgetFile, CountedRun, counted
from shuffled_dpsgd.training.record_digest import data_mark
from training.cases import Case, classify, make_mlp, mlp_case, run, vectors

DELTA = 1e-5
RUN = SampledGaussian(noise_multiplier=2.0, sampling_prob=0.25, num_steps=3)


@pytest.fixture
def file(tmp_path: Path) -> BudgetFile:
    made = BudgetFile(tmp_path / "b.json")
    made.create(delta=DELTA, epsilon=None, adjacency="add-remove")
    return made


def start(
    file: BudgetFile, model: torch.nn.Module | None = None, **changes: Any
) -> PrivateTraining:
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 10,
        "num_steps": 3,
        "delta": 1e-3,
        "noise_multiplier": 2.0,
        "shuffle": "off",
        "budget": str(file.path),
    }
    model = model or make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, **(settings | changes))


def limited(file: BudgetFile, epsilon: float) -> BudgetFile:
    other = BudgetFile(file.path.with_name("limited.json"))
    other.create(delta=DELTA, epsilon=epsilon, adjacency="add-remove")
    return other


def a_run(identity: str, **changes: Any) -> CountedRun:
    facts: dict[str, Any] = {
        "name": "a run",
        "began": "2026-01-01",
        "noise_multiplier": 2.0,
        "sampling_prob": 0.25,
        "num_steps": 3,
    }
    return CountedRun(identity=identity, **(facts | changes))


def test_every_run_is_counted_and_all_are_priced_together(file: BudgetFile) -> None:
    for number in range(1, 4):
        private = start(file)
        run(private, mlp_case())
        private.close()
        account = file.read()
        assert [each.ending for each in account.runs] == ["finished"] * number
        assert account.together() == claim_together([RUN] * number, DELTA)
        said = f"{number} runs in b.json, together {account.together().describe()}"
        assert any(said in line for line in private.card().not_covered)


@pytest.mark.slow
def test_different_plans_cost_what_an_accountant_without_our_code_says(file: BudgetFile) -> None:
    plans = [(0.25, 2.0, 3), (0.5, 4.0, 10), (0.1, 1.0, 20), (1.0, 30.0, 5)]
    for number, (q, sigma, steps) in enumerate(plans):
        entry = a_run(str(number), sampling_prob=q, noise_multiplier=sigma, num_steps=steps)
        file.enter(entry, "data")
    truth, error = true_epsilon_together([(*each, DELTA, "add-remove") for each in plans])
    assert truth - error <= file.read().together().epsilon <= truth * (1.0 + 1e-4) + error


def test_a_run_is_counted_before_its_first_release_and_not_before_that(file: BudgetFile) -> None:
    private = start(file)
    seen: list[int] = []
    original = private.ledger.record

    def record(**entry: Any) -> Any:
        seen.append(len(file.read().runs))
        return original(**entry)

    private.ledger.record = record  # type: ignore[method-assign]
    batches = private.batches(vectors())
    batch = next(iter(batches))
    assert file.read().runs == ()
    private.backward(classify(private.model, batch))
    private.step()
    assert seen == [1]


def test_a_run_that_stops_early_counts_with_its_whole_plan(file: BudgetFile) -> None:
    private = start(file)
    run(private, mlp_case(), num_steps=1)
    (known,) = file.read().runs
    assert known.ending == "begun, not heard of since: counted with all 3 steps"
    private.close()
    (known,) = file.read().runs
    assert known.ending == "stopped after 1 of 3 steps, counted with all"
    assert file.read().together() == claim_together([RUN], DELTA)


def test_what_would_exceed_the_limit_is_refused_and_releases_nothing(file: BudgetFile) -> None:
    two = claim_together([RUN] * 2, DELTA).epsilon
    file = limited(file, two * 1.01)
    for _ in range(2):
        run(start(file), mlp_case())
    third = start(file)
    before = file.path.read_bytes()
    with pytest.raises(BudgetExhaustedError, match="above the limit of"):
        run(third, mlp_case())
    assert third.ledger.spent == 0
    assert file.path.read_bytes() == before


def test_an_adaptive_budget_prices_all_runs_at_its_limit_and_keeps_it(tmp_path: Path) -> None:
    file = BudgetFile(tmp_path / "adaptive.json")
    file.create(delta=DELTA, epsilon=4.0, adjacency="add-remove", adaptive=True)

    def enter_many() -> None:
        for number in range(40):
            file.enter(a_run(str(number), noise_multiplier=1.5 + number % 3), "data")

    with pytest.raises(BudgetExhaustedError, match=r"% of what keeps ε = 4"):
        enter_many()
    account = file.read()
    assert 1 < len(account.runs) < 39
    claim = account.together()
    assert (claim.epsilon, claim.kind) == (4.0, "proven")
    assert any("may have been chosen" in line for line in claim.assumptions)
    by_orders = Filter(epsilon=4.0, delta=DELTA, first=account.spent[0])
    assert 0.5 < by_orders.share(account.spent) <= 1.0
    assert claim_together(account.spent, DELTA).epsilon < 4.0
    for wrong in ({"epsilon": None, "adjacency": "add-remove"}, {"adjacency": "replace-one"}):
        other = BudgetFile(tmp_path / "other.json")
        with pytest.raises(InvalidArgumentError, match="adaptive"):
            other.create(**{"delta": DELTA, "epsilon": 1.0, "adaptive": True} | wrong)


def test_a_budget_has_one_name_however_it_is_reached(file: BudgetFile, tmp_path: Path) -> None:
    link = tmp_path / "folder" / "link.json"
    link.parent.mkdir()
    link.symlink_to(file.path)
    BudgetFile(link).enter(a_run("through the link"), "data")
    file.enter(a_run("by its name"), "data")
    assert link.is_symlink()
    assert len(BudgetFile(link).read().runs) == len(file.read().runs) == 2
    os.link(file.path, tmp_path / "second.json")
    with pytest.raises(CheckpointError, match="second name"):
        file.enter(a_run("after a hard link"), "data")


def test_of_two_runs_that_both_fit_alone_the_second_to_release_is_refused(
    file: BudgetFile,
) -> None:
    file = limited(file, claim_together([RUN], DELTA).epsilon * 1.01)
    first, second = start(file), start(file, physical_batch_size=40)
    data = vectors()
    ahead = iter(second.batches(data))
    batch = next(ahead)
    run(first, mlp_case())
    second.backward(classify(second.model, batch))
    with pytest.raises(BudgetExhaustedError):
        second.step()
    assert second.ledger.spent == 0


def damaged(change: Callable[[dict[str, Any]], None]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        body = json.loads(text)
        change(body)
        return json.dumps(body)

    return apply


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "emptied": lambda text: "",
    "a run removed": damaged(lambda body: body["runs"].clear()),
    "steps edited": damaged(lambda body: body["runs"][0].update(num_steps=1)),
    "limit edited": damaged(lambda body: body.update(epsilon=100.0)),
    "no checksum": damaged(lambda body: body.pop("checksum") and None),
    "another kind of file": lambda text: "[1, 2]",
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_stops_every_run(file: BudgetFile, harm: Callable[[str], str]) -> None:
    run(start(file), mlp_case())
    file.path.write_text(harm(file.path.read_text()))
    with pytest.raises(CheckpointError, match=r"b\.json: damaged"):
        start(file)
    file.path.unlink()
    with pytest.raises(CheckpointError, match="no such budget"):
        start(file)


def test_damage_in_the_middle_of_a_run_costs_nobody_the_model(file: BudgetFile) -> None:
    private = start(file)
    run(private, mlp_case())
    file.path.write_text("{")
    with pytest.warns(UserWarning, match="not told how far this run got"):
        private.release()
    assert private.released


def test_other_records_are_refused_until_they_are_admitted(file: BudgetFile) -> None:
    run(start(file), mlp_case())
    inputs, labels = vectors().tensors
    other = torch.utils.data.TensorDataset(inputs + 1.0, labels)
    case = Case(make=make_mlp, data=other, loss=classify)
    with pytest.raises(CheckpointError, match="other records") as refusal:
        run(start(file), case)
    mark = data_mark(other, file.read().salt)
    assert f"budget admit {file.path} {mark}" in str(refusal.value)
    file.admit(mark)
    run(start(file), case)
    run(start(file), mlp_case())
    assert len(file.read().runs) == 3


def test_records_that_differ_at_each_load_are_refused(file: BudgetFile) -> None:
    class Restless:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(list(os.urandom(6))).float(), 0

    with pytest.raises(InvalidArgumentError, match="from one load to the next"):
        data_mark(Restless(), file.read().salt)


def test_augmentation_by_the_usual_generators_is_no_other_data(file: BudgetFile) -> None:
    class Augmented:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return vectors()[index][0] + torch.randn(6), 0

    before = torch.get_rng_state()
    salt = file.read().salt
    assert (
        data_mark(Augmented(), salt) == data_mark(Augmented(), salt) != data_mark(vectors(), salt)
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_twice_is_refused_though_the_models_differ(file: BudgetFile) -> None:
    run(start(file, seed=3), mlp_case())
    with pytest.raises(InvalidArgumentError, match="whose noise is used already"):
        run(start(file, seed=3), mlp_case())
    run(start(file, seed=4), mlp_case())
    assert "3" not in {each.seed for each in file.read().runs}


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 0.0},
        {"sampling": "unaccounted"},
        {"clip": "none"},
    ],
)
def test_what_nobody_can_price_is_refused_at_once(file: BudgetFile, changes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="budget"):
        start(file, **changes)


@pytest.mark.parametrize(
    "changes", [{"records_per_unit": 2}, {"largest_batch": 12}, {"noise_rows": ((1.0,),)}]
)
def test_plans_that_are_priced_otherwise_are_not_counted(file: BudgetFile, changes: Any) -> None:
    """Options refuse them before; here nobody has looked at any."""
    plan = replace(start(file).plan, **changes)
    with pytest.raises(InvalidArgumentError, match=next(iter(changes))):
        counted(plan, name="a run", salt="")


def test_going_on_with_a_run_counts_it_once(file: BudgetFile, tmp_path: Path) -> None:
    ledger = {"ledger_path": tmp_path / "run" / "ledger.jsonl"}
    (tmp_path / "run").mkdir()
    first = start(file, **ledger)
    run(first, mlp_case(), num_steps=2)
    checkpoint = save_checkpoint(first, tmp_path / "run" / "checkpoints")
    first.close()
    resumed = start(file, **ledger)
    load_checkpoint(resumed, checkpoint)
    run(resumed, mlp_case())
    resumed.close()
    (known,) = file.read().runs
    assert known.ending == "finished"
    assert known.name == "run: Sequential"


def test_a_ledger_that_was_put_back_is_noticed(file: BudgetFile, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    first = start(file, ledger_path=ledger)
    run(first, mlp_case(), num_steps=1)
    save_checkpoint(first, tmp_path / "checkpoints")
    old = ledger.read_bytes()
    run(first, mlp_case())
    first.close()
    ledger.write_bytes(old)
    again = start(file, ledger_path=ledger)
    with pytest.raises(CheckpointError, match="knows of 3 releases of this run"):
        run(again, mlp_case())


def test_a_run_after_a_ledger_that_was_removed_is_another_run(
    file: BudgetFile, tmp_path: Path
) -> None:
    """The key beside the ledger stays, and with it the run would be taken for the one before."""
    ledger = tmp_path / "ledger.jsonl"
    for noise in (2.0, 1.0):
        private = start(file, ledger_path=ledger, noise_multiplier=noise)
        run(private, mlp_case(), num_steps=1)
        ledger.unlink()
    assert [each.noise_multiplier for each in file.read().runs] == [2.0, 1.0]


def test_a_write_that_fails_leaves_the_file_as_it_was(
    file: BudgetFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(start(file), mlp_case())
    before = file.path.read_bytes()

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    private = start(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(CheckpointError, match=r"b\.json: could not be written \(No space"):
            run(private, mlp_case())
    assert private.ledger.spent == 0
    assert file.path.read_bytes() == before
    run(start(file), mlp_case())
    assert len(file.read().runs) == 2


def test_a_file_made_read_only_refuses_further_runs_and_no_reader(file: BudgetFile) -> None:
    run(start(file), mlp_case())
    file.path.chmod(0o444)
    before, private = file.path.read_bytes(), start(file)
    with pytest.raises(CheckpointError, match=r"b\.json: could not be written \(it is read-only"):
        run(private, mlp_case())
    assert private.ledger.spent == 0
    assert file.path.read_bytes() == before
    assert len(file.read().runs) == 1


def test_a_budget_is_never_overwritten_and_keeps_its_mode(file: BudgetFile) -> None:
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.path.chmod(0o660)
    file.enter(a_run("a"), "data")
    assert file.path.stat().st_mode & 0o777 == 0o660
    with pytest.raises(InvalidArgumentError, match="a new file"):
        file.create(delta=DELTA, epsilon=1.0, adjacency="add-remove")


PROGRAM = """
    import sys
    from pathlib import Path
    import torch
    sys.path.insert(0, {tests!r})
    from shuffled_dpsgd.training.budget import BudgetFile
    from training.cases import classify, make_mlp, vectors
    from training.test_budget import a_run, start

    file = BudgetFile(sys.argv[1])
    for number in range(int(sys.argv[2])):
        file.enter(a_run(f"{{sys.argv[1:]}}, {{number}}"), "data")
    if sys.argv[2] == "0":
        private = start(file, num_steps=50)
        for batch in private.batches(vectors()):
            private.backward(classify(private.model, batch))
            private.step()
            if private.steps_taken:
                print("released", flush=True)
                sys.stdin.read()
"""


def program(file: BudgetFile, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    code = textwrap.dedent(PROGRAM).format(tests=str(Path(__file__).parents[1]))
    command = [sys.executable, "-c", code, str(file.path), *arguments]
    return subprocess.Popen(command, text=True, **options)


def test_processes_at_once_lose_no_run(file: BudgetFile) -> None:
    both = [program(file, "25", name) for name in ("first", "second")]
    assert [each.wait(timeout=240) for each in both] == [0, 0]
    assert len({each.identity for each in file.read().runs}) == 50


def test_a_run_killed_in_the_middle_counts_with_its_whole_plan(file: BudgetFile) -> None:
    killed = program(file, "0", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "released\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    for pipe in (killed.stdin, killed.stdout):
        assert pipe is not None
        pipe.close()
    (known,) = file.read().runs
    assert known.num_steps == 50
    assert known.ending.startswith("begun, not heard of since")
    began = time.monotonic()
    run(start(file), mlp_case())  # The lock of a process that is gone holds nobody up.
    assert time.monotonic() - began < 60
    assert len(file.read().runs) == 2
