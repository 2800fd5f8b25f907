"""Work is done ahead in threads, and whoever needs it waits for it."""

from __future__ import annotations

import sys
import threading
from functools import partial

import torch

from shuffled_dpsgd.runtime.interpreter_share import SHARE
from shuffled_dpsgd.runtime.rehearsals import Rehearsals, are_whole, is_rehearsing, may_rehearse

CPU = torch.device("cpu")


def test_waiting_for_a_topic_waits_for_its_work_alone() -> None:
    rehearsals = Rehearsals(threads=2)
    go, done = threading.Event(), []
    rehearsals.add("slow", lambda: (go.wait(10), done.append("slow")), CPU)
    rehearsals.add("fast", lambda: done.append("fast"), CPU)
    rehearsals.wait_for("fast")
    assert done == ["fast"]
    go.set()
    rehearsals.wait_for("slow")
    assert done == ["fast", "slow"]
    rehearsals.wait_for("unknown")


def test_work_runs_in_several_threads_at_a_time_and_without_gradients() -> None:
    rehearsals = Rehearsals(threads=2)
    together = threading.Barrier(2, timeout=10)
    found: list[bool] = []

    def work() -> None:
        together.wait()
        found.append(torch.is_grad_enabled() or not is_rehearsing())

    for _ in range(4):
        rehearsals.add("both", work, CPU)
    rehearsals.wait_for("both")
    assert found == [False] * 4
    assert not is_rehearsing()


def test_work_that_waits_does_not_keep_later_work_from_its_thread() -> None:
    """Threads start each other; a thread that is busy starts none, and the caller does."""
    rehearsals = Rehearsals(threads=8)
    go = threading.Event()

    def wait() -> None:
        with SHARE.given_back():
            go.wait(10)

    for _ in range(3):
        rehearsals.add("waits", wait, CPU)
    rehearsals.add("later", lambda: None, CPU)
    rehearsals.wait_for("later")
    rehearsals.add("last", lambda: None, CPU)
    rehearsals.wait_for("last")
    assert not go.is_set()
    go.set()
    rehearsals.wait_for("waits")


def test_there_are_never_more_threads_than_allowed() -> None:
    rehearsals, found = Rehearsals(threads=2), []
    for _ in range(20):
        rehearsals.add("topic", lambda: found.append(rehearsals._threads), CPU)
    rehearsals.wait_for("topic")
    assert max(found) <= 2
    assert len(found) == 20


def test_a_trial_is_no_rehearsal() -> None:
    rehearsals, found = Rehearsals(threads=1), []
    rehearsals.add("rehearsal", lambda: found.append(is_rehearsing()), CPU)
    rehearsals.add("trial", lambda: found.append(is_rehearsing()), CPU, is_trial=True)
    rehearsals.wait_for("trial")
    assert found == [True, False]


def test_threads_take_turns_often_while_there_is_work_and_only_then() -> None:
    before = sys.getswitchinterval()
    rehearsals, found = Rehearsals(threads=1), []
    rehearsals.add("topic", lambda: found.append(sys.getswitchinterval()), CPU)
    rehearsals.wait_for("topic")
    assert found[0] < before
    for thread in threading.enumerate():
        if thread.name == "rehearsal":
            thread.join()
    assert sys.getswitchinterval() == before


def test_a_failure_stops_neither_the_others_nor_the_caller() -> None:
    rehearsals = Rehearsals(threads=1)
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no such kernel")

    rehearsals.add("topic", fail, CPU)
    rehearsals.add("topic", lambda: done.append("next"), CPU)
    rehearsals.wait_for("topic")
    assert done == ["next"]


def test_what_is_urgent_is_done_first() -> None:
    rehearsals, done = Rehearsals(threads=1), []
    go = threading.Event()
    rehearsals.add("topic", lambda: go.wait(10), CPU)
    for name, is_urgent in (("later", False), ("first", True), ("last", False), ("second", True)):
        rehearsals.add("topic", partial(done.append, name), CPU, is_urgent=is_urgent)
    go.set()
    rehearsals.wait_for("topic")
    assert done == ["first", "second", "later", "last"]


def test_a_process_that_ends_waits_for_what_has_begun_but_not_for_long() -> None:
    rehearsals, done = Rehearsals(threads=1), []
    began, go = threading.Event(), threading.Event()
    rehearsals.add("topic", lambda: (began.set(), go.wait(10), done.append("first")), CPU)
    rehearsals.add("topic", lambda: done.append("second"), CPU)
    began.wait(10)
    rehearsals.end(0.01)
    assert done == []
    threading.Timer(0.05, go.set).start()
    rehearsals.end(10)
    assert done == ["first"]
    for thread in threading.enumerate():
        if thread.name == "rehearsal":
            thread.join(10)
    assert done == ["first"]


def test_nothing_is_rehearsed_where_nothing_is_compiled() -> None:
    assert not may_rehearse(CPU)


def test_tensors_of_other_kinds_are_left_alone() -> None:
    """A thread that gathered a sharded tensor would wait for processes that do not know of it."""

    class Sharded(torch.Tensor):
        pass

    plain = [torch.zeros(2), torch.nn.Parameter(torch.zeros(2))]
    assert are_whole(plain)
    assert not are_whole([*plain, torch.zeros(2).as_subclass(Sharded)])
