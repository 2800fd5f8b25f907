"""A worker answers every request, and leaves when nobody is there to ask."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shuffled_dpsgd.runtime.compiling import requests, worker
from shuffled_dpsgd.runtime.compiling.worker import DONE


class Asker:
    """The other end of a worker that serves in a thread."""

    def __init__(self, reason: str | None = None) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.urgent, self.patient = (ours for ours, _ in pairs)
        lanes = [theirs for _, theirs in pairs]
        self.thread = threading.Thread(target=self._serve, args=(lanes, reason))
        self.thread.start()

    def _serve(self, lanes: list[socket.socket], reason: str | None) -> None:
        worker.serve(lanes, reason)
        for lane in lanes:
            lane.close()

    def send(self, lane: socket.socket, request: bytes) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(lane, [b"compile"], [theirs.fileno()])
        ours.sendall(request)
        ours.shutdown(socket.SHUT_WR)
        return ours

    def ask(self, request: bytes) -> bytes:
        with self.send(self.urgent, request) as connection:
            return worker.read_all(connection)

    def leave(self) -> None:
        self.urgent.close()
        self.patient.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def asker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    monkeypatch.setattr(worker, "compile_one", lambda request: b"compiled " + request)
    asker = Asker()
    yield asker
    asker.leave()


def test_requests_are_answered_one_after_the_other(asker: Asker) -> None:
    assert asker.ask(b"this") == b"compiled this"
    assert asker.ask(b"that" * 100_000) == b"compiled " + b"that" * 100_000


def test_what_is_urgent_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, done = threading.Event(), threading.Event(), []

    def compile_one(request: bytes) -> bytes:
        began.set()
        go.wait(10)
        done.append(request)
        return DONE

    monkeypatch.setattr(worker, "compile_one", compile_one)
    asker = Asker()
    connections = [asker.send(asker.patient, b"first")]
    began.wait(10)
    connections += [asker.send(asker.patient, b"third"), asker.send(asker.urgent, b"second")]
    go.set()
    for connection in connections:
        with connection:
            assert worker.read_all(connection) == DONE
    assert done == [b"first", b"second", b"third"]
    asker.leave()


def test_a_worker_goes_on_when_whoever_asked_has_ended(asker: Asker) -> None:
    asker.send(asker.urgent, b"this").close()
    assert asker.ask(b"that") == b"compiled that"


def test_a_worker_without_triton_says_why() -> None:
    asker = Asker("ImportError: no triton")
    assert asker.ask(b"this") == b"ImportError: no triton"
    asker.leave()


def test_a_worker_that_has_nothing_to_do_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.05)
    asker = Asker()
    asker.thread.join(10)
    assert not asker.thread.is_alive()
    asker.leave()


def test_what_cannot_be_compiled_is_an_answer() -> None:
    answer = worker.compile_one(b"no request")
    assert answer != DONE
    assert answer.startswith(b"UnpicklingError")


def test_an_answer_has_what_the_compiler_wrote_and_did_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_request(request: object) -> None:
        os.write(complaints, b"note: at line 3\nkernel.py:3: error: no such layout\n")
        raise RuntimeError("parsing failed")

    complaints = os.memfd_create("complaints")
    os.write(complaints, b"error: of the request before\n" * 9)
    monkeypatch.setattr(worker, "_complaints", complaints)
    monkeypatch.setattr(worker, "compile_request", compile_request)
    monkeypatch.setattr(requests, "decode", lambda text: SimpleNamespace(environment={}))
    monkeypatch.setattr(requests, "adopt", lambda environment: None)
    answer = worker.compile_one(b"a request")
    os.close(complaints)
    assert answer == b"RuntimeError: parsing failed; kernel.py:3: error: no such layout"


def test_the_driver_is_built_for_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def refuse() -> None:
        built.append("tried")
        raise FileNotFoundError("no C compiler")

    for build in (lambda: built.append("built"), refuse):
        driver = SimpleNamespace(CudaUtils=build)
        monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
        worker._build_driver()
    assert built == ["built", "tried"]
