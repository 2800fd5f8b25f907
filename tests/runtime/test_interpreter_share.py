"""Of the threads that work beside the main one, a few run at a time, and none waits for ever."""

from __future__ import annotations

import threading
import time

from shuffled_dpsgd.runtime.interpreter_share import InterpreterShare


class Counted:
    """Threads inside at the moment, and the most there were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


def run_all(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_at_most_so_many_threads_run_at_a_time() -> None:
    share, inside = InterpreterShare(most=2, patience=10.0), Counted()

    def work() -> None:
        with share.taken(), inside:
            time.sleep(0.01)

    run_all(*(threading.Thread(target=work) for _ in range(8)))
    assert inside.most == 2


def test_a_thread_that_waits_lets_another_run() -> None:
    share = InterpreterShare(most=1, patience=10.0)
    has_run, came_back = threading.Event(), []

    def wait() -> None:
        with share.taken():
            with share.given_back():
                assert has_run.wait(10)
            came_back.append(share._turns._value)

    def run() -> None:
        with share.taken():
            has_run.set()

    run_all(threading.Thread(target=wait), threading.Thread(target=run))
    assert came_back == [0], "it has its turn again"
    assert share._turns._value == 1


def test_a_thread_that_has_waited_for_long_runs_all_the_same() -> None:
    """Whoever has the turn may wait for it; and what was not taken is not given back."""
    share, ran = InterpreterShare(most=1, patience=0.01), []

    def work() -> None:
        with share.taken(), share.given_back():
            ran.append(share._turns._value)

    with share.taken():
        run_all(threading.Thread(target=work))
    assert ran == [0]
    assert share._turns._value == 1


def test_a_thread_without_a_turn_gives_none_back() -> None:
    share = InterpreterShare(most=1)
    with share.given_back():
        assert share._turns._value == 1
    assert share._turns._value == 1


def test_a_turn_is_given_back_after_an_error() -> None:
    share = InterpreterShare(most=1)
    try:
        with share.taken(), share.given_back():
            raise RuntimeError("no such kernel")
    except RuntimeError:
        assert share._turns._value == 1
