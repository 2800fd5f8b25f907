"""Whatever happens to the processes that compile, whoever asks them gets an answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shuffled_dpsgd.runtime.compiling import workers
from shuffled_dpsgd.runtime.compiling.workers import WorkerError, Workers, fair_share

# A process that takes one request and then does what a test says.
TAKES_ONE = """import socket, time
control = socket.socket(fileno={descriptors}[0])
_, descriptors, _, _ = socket.recv_fds(control, 16, 1)
connection = socket.socket(fileno=descriptors[0])
request = connection.recv(100)
"""


Start = Callable[[str], Workers]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts processes that run other code than workers do."""
    pools: list[Workers] = []

    def start(code: str) -> Workers:
        monkeypatch.setattr(workers, "_CODE", code)
        pools.append(Workers(1))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()
        pool.process.kill()


def test_a_request_is_answered(start: Start) -> None:
    code = TAKES_ONE + "connection.sendall(b'done' if request == b'kernel' else b'what?')"
    pool = start(code)
    pool.ask(b"kernel").wait()
    assert pool.process.wait(10) == 0


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("connection.sendall(b'CompilationError: no such thing')", "no such thing"),
        ("raise SystemExit(1)", "has ended"),
        ("import os; os.kill(os.getpid(), 9)", "has ended"),
        ("time.sleep(60)", "no answer in"),
    ],
)
def test_what_goes_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, start: Start, then: str, said: str
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(workers, "_LOOK_EVERY_SECONDS", 0.05)
    pool = start(TAKES_ONE + then)
    with pytest.raises(WorkerError, match=said):
        pool.ask(b"kernel").wait()


def test_a_request_is_waited_for_as_long_as_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(workers, "_LOOK_EVERY_SECONDS", 0.05)
    pool = start(TAKES_ONE + "time.sleep(0.9); connection.sendall(b'done')")
    answer, end = pool.ask(b"kernel"), time.monotonic() + 0.8

    def answer_others() -> None:
        while time.monotonic() < end:
            pool.last_sign = time.monotonic()
            time.sleep(0.05)

    others = threading.Thread(target=answer_others)
    others.start()
    answer.wait()
    others.join()


@pytest.mark.parametrize(("code", "left"), [("", True), ("raise SystemExit(3)", False)])
def test_processes_that_are_gone_are_not_waited_for(start: Start, code: str, left: bool) -> None:
    pool = start(code)
    pool.process.wait(10)
    with pytest.raises(WorkerError):
        pool.ask(b"kernel").wait()
    assert pool.have_left is left


def test_processes_that_never_take_a_request_end_it(start: Start) -> None:
    """A request that was sent before they ended is answered by the end of their socket."""
    pool = start("import time; time.sleep(0.2)")
    with pytest.raises(WorkerError, match=r"has ended|Broken pipe|reset"):
        pool.ask(b"kernel").wait()


def test_the_other_process_imports_what_this_one_does(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "there"])
    code = "import sys; sys.path[:] = {path!r}; sys.exit(sys.path[-1] != 'there')"
    assert start(code).process.wait(10) == 0


def test_what_is_not_urgent_comes_another_way(start: Start) -> None:
    code = TAKES_ONE.replace("[0])\n_,", "[1])\n_,") + "connection.sendall(b'done')"
    assert code != TAKES_ONE + "connection.sendall(b'done')"
    start(code).ask(b"kernel", is_urgent=False).wait()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: set(range(16)))
    for ranks, share in ((None, 14), ("1", 14), ("2", 7), ("8", 1), ("64", 1)):
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert fair_share() == share
