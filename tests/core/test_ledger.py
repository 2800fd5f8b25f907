"""The ledger: durable before a release, never above the budget, never edited unnoticed."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from unittest import mock

import pytest

from shuffled_dpsgd.core.ledger import Ledger, LedgerEntry
from shuffled_dpsgd.errors import BudgetExhaustedError, CheckpointError


def open_ledger(path: Path | None, plan: str = "plan", budget: int = 3) -> Ledger:
    return Ledger(plan_fingerprint=plan, max_releases=budget, path=path)


def test_budget_is_never_exceeded() -> None:
    ledger = open_ledger(None)
    for step in range(3):
        ledger.record(step=step, token=str(step))
    assert ledger.remaining == 0
    with pytest.raises(BudgetExhaustedError, match="release 4 of 3"):
        ledger.record(step=3, token="3")
    assert ledger.spent == 3


def test_releases_survive_and_repetitions_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = open_ledger(path)
    first.record(step=0, token="a")
    first.record(step=1, token="b")
    second = open_ledger(path)
    assert second.spent == 2
    second.record(step=1, token="b")
    assert second.spent == 2
    second.record(step=1, token="fresh noise for the same step")
    assert second.remaining == 0
    assert open_ledger(path).spent == 3


def test_a_torn_last_line_announces_a_release_that_never_happened(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    ledger.record(step=0, token="a")
    whole = path.read_bytes()
    ledger.record(step=1, token="b")
    for cut in range(len(whole) + 1, len(path.read_bytes())):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(path.read_bytes()[:cut])
        (tmp_path / "_torn.jsonl.key").write_bytes(ledger.key)
        again = open_ledger(torn)
        assert again.spent == 1
        again.record(step=1, token="c")
        assert open_ledger(torn).spent == 2


def test_a_torn_header_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    open_ledger(path)
    path.write_bytes(b'{"plan": "pl')
    open_ledger(path).record(step=0, token="a")
    assert open_ledger(path).spent == 1


@pytest.mark.parametrize("line", [1, 2])
def test_edited_and_cut_ledgers_are_refused(tmp_path: Path, line: int) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    for step in range(3):
        ledger.record(step=step, token=str(step))
    lines = path.read_text().splitlines(keepends=True)
    edited = json.loads(lines[line]) | {"token": "x"}
    path.write_text("".join([*lines[:line], json.dumps(edited) + "\n", *lines[line + 1 :]]))
    with pytest.raises(CheckpointError, match=f"line {line + 1}"):
        open_ledger(path)
    path.write_text("".join([*lines[:line], *lines[line + 1 :]]))
    with pytest.raises(CheckpointError, match=f"line {line + 1}"):
        open_ledger(path)
    path.write_text("".join([*lines[:line], "not json\n", *lines[line + 1 :]]))
    with pytest.raises(CheckpointError, match="not a ledger entry"):
        open_ledger(path)


def test_the_ledger_of_another_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    open_ledger(path, plan="one")
    with pytest.raises(CheckpointError, match="plan one"):
        open_ledger(path, plan="other")


def test_two_runs_on_one_ledger_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    one, other = open_ledger(path), open_ledger(path)
    one.record(step=0, token="a")
    with pytest.raises(CheckpointError, match="another process"):
        other.record(step=0, token="b")
    assert other.spent == 0
    assert open_ledger(path).spent == 1


def test_a_checkpoint_ahead_of_its_ledger_is_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(CheckpointError, match="2 releases"):
        ledger.adopt([LedgerEntry(0, 0, "a"), LedgerEntry(1, 0, "b")], durable=True)
    ledger.adopt([LedgerEntry(0, 0, "a"), LedgerEntry(0, 1, "b")], durable=False)
    again = open_ledger(ledger.path)
    assert (again.spent, again.repeated_steps) == (2, 1)
    assert again.record(step=0, token="c").attempt == 2


def test_other_sums_at_a_step_are_its_next_attempt(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert open_ledger(path).record(step=0, token="a").attempt == 0
    resumed = open_ledger(path)
    assert resumed.record(step=0, token="a").attempt == 0
    assert resumed.record(step=0, token="other sums").attempt == 1
    assert resumed.record(step=1, token="b").attempt == 0
    assert (resumed.spent, resumed.repeated_steps) == (3, 1)
    assert resumed.allows(1, secure=False)
    assert not resumed.allows(1, secure=True)
    assert not resumed.allows(2, secure=False)


def forged(path: Path, key: bytes, tokens: list[str]) -> None:
    """A ledger as somebody with `key` would write it."""
    other = path.with_name("other.jsonl")
    with mock.patch("shuffled_dpsgd.core.ledger.secrets.token_bytes", return_value=key):
        ledger = open_ledger(other, budget=100)
    for step, token in enumerate(tokens):
        ledger.record(step=step, token=token)
    path.write_bytes(other.read_bytes())
    other.unlink()


def test_a_ledger_made_up_without_the_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    open_ledger(path, budget=100).record(step=0, token="a")
    forged(path, bytes(32), ["a"])
    with pytest.raises(CheckpointError, match="line 1 does not follow"):
        open_ledger(path, budget=100)


def test_a_ledger_whose_key_is_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    open_ledger(path)
    (tmp_path / "_ledger.jsonl.key").unlink()
    with pytest.raises(CheckpointError, match="put it back"):
        open_ledger(path)


def test_repeated_tokens_do_not_hide_releases(tmp_path: Path) -> None:
    """Steps that claim one and the same release would read as a single one."""
    path = tmp_path / "ledger.jsonl"
    key = open_ledger(path, budget=100).key
    forged(path, key, ["a", "a", "a"])
    with pytest.raises(CheckpointError, match="repeats a release"):
        open_ledger(path, budget=100)


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    open_ledger(path)
    header = json.loads(path.read_text()) | {"streams": 1}
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(CheckpointError, match="another version"):
        open_ledger(path)


def test_two_writers_take_turns(tmp_path: Path) -> None:
    """The check that nobody else wrote and the writing itself are one, across processes."""
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    holder = open(path, "ab")  # noqa: SIM115 - closed below, to let the writer go on
    fcntl.flock(holder, fcntl.LOCK_EX)
    writer = threading.Thread(target=lambda: ledger.record(step=0, token="a"))
    writer.start()
    writer.join(timeout=0.2)
    assert writer.is_alive()
    holder.close()
    writer.join()
    assert ledger.spent == 1
