"""Work on torch's own CPU threads: all of it done, errors raised, and a child that was forked."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch

from shuffled_dpsgd.runtime import cpu_threads
from shuffled_dpsgd.runtime.cpu_threads import on_all_threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["GNU's library", "a pool"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, on a machine whose torch has the first."""
    if request.param == "a pool":
        monkeypatch.setattr(cpu_threads, "_gnu_parallel_region", lambda: None)
    return str(request.param)


def meeting(names: set[int]) -> Callable[[], None]:
    """Work that ends only once two threads do it."""
    both = threading.Barrier(2, timeout=20)

    def work() -> None:
        both.wait()
        names.add(threading.get_native_id())

    return work


def test_two_threads_work_at_once_and_this_is_one_of_them(library: str) -> None:
    names: set[int] = set()
    on_all_threads(meeting(names), most=2)
    assert len(names) == 2
    assert threading.get_native_id() in names


def test_what_one_thread_raises_is_raised_here_after_the_other_has_finished(library: str) -> None:
    tasks, done = deque(range(20)), []

    def work() -> None:
        while tasks:
            try:
                task = tasks.popleft()
            except IndexError:
                return
            if task == 0:
                raise ValueError("the first task")
            done.append(task)

    with pytest.raises(ValueError, match="the first task"):
        on_all_threads(work, most=20)
    assert sorted(done) == list(range(1, 20))


@pytest.mark.parametrize(("threads", "most"), [(1, 5), (2, 1)])
def test_one_thread_is_enough_for_one_piece_of_work(threads: int, most: int) -> None:
    torch.set_num_threads(threads)
    names: list[int] = []
    on_all_threads(lambda: names.append(threading.get_native_id()), most=most)
    assert names == [threading.get_native_id()]


def test_no_more_threads_work_than_there_are_pieces() -> None:
    torch.set_num_threads(4)
    names: list[int] = []
    on_all_threads(lambda: names.append(threading.get_native_id()), most=3)
    assert len(names) == 3


def test_the_threads_are_those_that_torch_computes_with() -> None:
    if cpu_threads._gnu_parallel_region() is None:
        pytest.skip("this torch does not compute with GNU's OpenMP")
    first: set[int] = set()
    second: set[int] = set()
    on_all_threads(meeting(first), most=2)
    torch.randn(600, 600) @ torch.randn(600, 600)
    on_all_threads(meeting(second), most=2)
    assert first == second


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    on_all_threads(meeting(set()), most=2)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        on_all_threads(lambda: done.append(1), most=2)
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
