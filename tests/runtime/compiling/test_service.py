"""Processes are started once, only where they are of use, and never stop a run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shuffled_dpsgd.runtime import launchers, rehearsals
from shuffled_dpsgd.runtime.compiling import service


class FakeWorkers:
    started: int = 0
    closed: int = 0
    have_left = False

    def __init__(self, *, is_early: bool = False) -> None:
        FakeWorkers.started += 1
        self.is_early = is_early

    def close(self) -> None:
        FakeWorkers.closed += 1


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeWorkers.started = FakeWorkers.closed = 0
    monkeypatch.setattr(service, "Workers", FakeWorkers)
    monkeypatch.setattr(service, "install", lambda workers, ready: SimpleNamespace(workers=workers))
    monkeypatch.setattr(service, "_hooks", [])
    monkeypatch.setattr(service, "_early", [])
    monkeypatch.setattr(service, "triton_available", lambda: True)
    monkeypatch.setattr(service, "_import_compiler", lambda: None)
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


def test_processes_that_were_started_early_are_taken_over() -> None:
    for _ in range(2):
        service.begin_early()
    early = service._early[0]
    assert early.is_early
    service.begin()
    service.begin_early()
    assert (FakeWorkers.started, FakeWorkers.closed) == (1, 0)
    assert service._hooks[0].workers is early


def test_processes_that_were_started_too_early_are_replaced() -> None:
    service.begin_early()
    early = service._early[0]
    early.have_left = True
    service.begin()
    assert (FakeWorkers.started, FakeWorkers.closed) == (2, 1)
    assert service._hooks[0].workers is not early


def test_a_system_that_allows_no_process_is_not_said_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError("too many processes")

    said: list[str] = []
    monkeypatch.setattr(service, "Workers", refuse)
    monkeypatch.setattr(service, "say_once", said.append)
    service.begin_early()
    assert said == []
    service.begin()
    assert len(said) == 1


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_compile_as_they_did(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(service.sys, "platform", platform)
    service.begin_early()
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


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsals, "_DRIVERS", (Path("nowhere"), tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("CUDA_VISIBLE_DEVICES", rehearsals.SWITCH):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("gpu_machine")
def test_they_are_started_early_where_there_is_a_gpu() -> None:
    rehearsals.get_ready_early()
    assert FakeWorkers.started == 1


@pytest.mark.usefixtures("gpu_machine")
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (os.environ, "CUDA_VISIBLE_DEVICES", ""),
        (os.environ, "CUDA_VISIBLE_DEVICES", "-1"),
        (os.environ, rehearsals.SWITCH, "0"),
        (torch.version, "cuda", None),
        (rehearsals, "_DRIVERS", (Path("nowhere"),)),
        (rehearsals.multiprocessing, "parent_process", lambda: "the one that trains"),
    ],
)
def test_elsewhere_nothing_is_started_early(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    change = monkeypatch.setitem if owner is os.environ else monkeypatch.setattr
    change(owner, name, value)
    rehearsals.get_ready_early()
    assert FakeWorkers.started == 0


@pytest.mark.usefixtures("gpu_machine")
def test_whether_there_is_a_gpu_is_found_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise AssertionError("from now on CUDA_VISIBLE_DEVICES would be ignored")

    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", refuse)
    assert rehearsals.has_nvidia_gpu()


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


@pytest.mark.parametrize("begin", [service.begin, service.begin_early])
def test_the_compiler_is_imported_between_the_processes_and_the_threads(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        service, "_import_compiler", lambda: seen.append(f"{FakeWorkers.started} started")
    )
    monkeypatch.setattr(service, "_digest", lambda: seen.append("thread"))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace())
    begin()
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join()
    assert seen == ["1 started", "thread"]


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
