"""Processes are started once, only where they are of use, and never stop a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from shuffled_dpsgd.runtime import launchers, rehearsals
from shuffled_dpsgd.runtime.compiling import service


class FakeWorkers:
    started: int = 0
    closed: int = 0
    have_left = False

    def __init__(self) -> None:
        FakeWorkers.started += 1

    def close(self) -> None:
        FakeWorkers.closed += 1


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeWorkers.started = FakeWorkers.closed = 0
    monkeypatch.setattr(service, "Workers", FakeWorkers)
    monkeypatch.setattr(service, "install", lambda workers, ready: SimpleNamespace(workers=workers))
    monkeypatch.setattr(service, "_hooks", [])
    monkeypatch.setattr(service, "triton_available", lambda: True)
    monkeypatch.setattr(service, "_driver", lambda: None)
    monkeypatch.setattr(service, "_digest", lambda: None)
    monkeypatch.setattr(service.sys, "platform", "linux")
    monkeypatch.setattr(launchers, "make_safe_for_threads", lambda: True)
    service._begin.cache_clear()
    yield
    service._begin.cache_clear()


def test_processes_are_started_once() -> None:
    for _ in range(3):
        service.begin()
    assert FakeWorkers.started == 1


def test_processes_that_have_left_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    service.begin()
    monkeypatch.setattr(service._hooks[0].workers, "have_left", True)
    for _ in range(2):
        service.begin()
    assert (FakeWorkers.started, FakeWorkers.closed) == (2, 1)


def test_processes_that_are_of_no_use_are_not_replaced() -> None:
    service.begin()
    service._hooks[0].workers = None
    service.begin()
    assert FakeWorkers.started == 1


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_compile_as_they_did(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(service.sys, "platform", platform)
    service.begin()
    assert FakeWorkers.started == 0


def test_without_triton_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "triton_available", lambda: False)
    service.begin()
    assert FakeWorkers.started == 0


def test_they_are_started_for_a_gpu_unless_rehearsals_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    rehearsals.get_ready(torch.device("cpu"))
    monkeypatch.setenv(rehearsals.SWITCH, "0")
    rehearsals.get_ready(gpu)
    assert FakeWorkers.started == 0
    monkeypatch.delenv(rehearsals.SWITCH)
    rehearsals.get_ready(gpu)
    assert FakeWorkers.started == 1


def test_a_system_that_allows_no_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def refuse() -> None:
        raise OSError("too many processes")

    monkeypatch.setattr(service, "Workers", refuse)
    monkeypatch.setattr(service, "say_once", said.append)
    service.begin()
    assert ["too many processes" in text for text in said] == [True]


def test_a_release_that_is_not_understood_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(service, "install", lambda workers, ready: None)
    monkeypatch.setattr(service, "say_once", said.append)
    service.begin()
    assert (len(said), FakeWorkers.closed) == (1, 1)


def test_where_threads_may_not_compile_nobody_does_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "make_safe_for_threads", lambda: False)
    service.begin()
    assert (FakeWorkers.started, FakeWorkers.closed) == (1, 1)
    assert service.tally() == {}


def test_processes_begin_before_this_one_imports_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by_then: list[int] = []

    def look() -> bool:
        started_by_then.append(FakeWorkers.started)
        return True

    monkeypatch.setattr(launchers, "make_safe_for_threads", look)
    rehearsals.get_ready(torch.device("cuda"))
    assert started_by_then == [1]


def test_work_is_done_once_and_waited_for() -> None:
    go, done = threading.Event(), []
    once = service._Once(lambda: (go.wait(10), done.append(1)))
    threads = [threading.Thread(target=lambda: (once(), done.append(2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert done == [1, 2, 2, 2]
