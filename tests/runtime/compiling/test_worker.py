"""A worker answers every request, and leaves when nobody is there to ask."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from shuffled_dpsgd.runtime.compiling import worker
from shuffled_dpsgd.runtime.compiling.worker import DONE


class Asker:
    """The other end of a worker that serves in a thread."""

    def __init__(self, reason: str | None = None) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.thread = threading.Thread(target=self._serve, args=(theirs, reason))
        self.thread.start()

    def _serve(self, control: socket.socket, reason: str | None) -> None:
        with control:
            worker._serve(control, reason)

    def ask(self, request: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self.control, [b"compile"], [theirs.fileno()])
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
            return worker.read_all(ours)


@pytest.fixture
def asker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    monkeypatch.setattr(worker, "compile_one", lambda request: b"compiled " + request)
    asker = Asker()
    yield asker
    asker.control.close()
    asker.thread.join(10)
    assert not asker.thread.is_alive()


def test_requests_are_answered_one_after_the_other(asker: Asker) -> None:
    assert asker.ask(b"this") == b"compiled this"
    assert asker.ask(b"that" * 100_000) == b"compiled " + b"that" * 100_000


def test_a_worker_without_triton_says_why() -> None:
    asker = Asker("ImportError: no triton")
    assert asker.ask(b"this") == b"ImportError: no triton"
    asker.control.close()
    asker.thread.join(10)


def test_a_worker_that_has_nothing_to_do_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.05)
    asker = Asker()
    asker.thread.join(10)
    assert not asker.thread.is_alive()
    asker.control.close()


def test_what_cannot_be_compiled_is_an_answer() -> None:
    answer = worker.compile_one(b"no request")
    assert answer != DONE
    assert answer.startswith(b"UnpicklingError")
