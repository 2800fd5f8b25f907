"""An announcement launches nothing, runs once, and fails without a word."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shuffled_dpsgd.runtime import routes
from shuffled_dpsgd.runtime.compiling.announcements import announce, announced_by, is_announcing
from shuffled_dpsgd.runtime.routes import WrongResult, expect

jit = pytest.importorskip("triton.runtime.jit")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Triton's method is called with, unless it is only to warm up."""
    launched: list[str] = []

    def run(kernel: str, *args: Any, grid: Any, warmup: bool) -> None:
        if not warmup:
            launched.append(kernel)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return launched


def launch(kernel: str) -> None:
    jit.JITFunction.run(kernel, grid=(1,), warmup=False)


def test_an_announcement_runs_once_and_launches_nothing(launched: list[str]) -> None:
    before, ran = jit.JITFunction.run, []

    def work() -> None:
        ran.append(is_announcing())
        launch("kernel")
        announce()  # A kernel is missing in the announcement too.

    with announced_by(work):
        for _ in range(2):
            announce()
        assert not is_announcing()
        assert launched == []
        launch("kernel")
    announce()
    assert ran == [True]
    assert launched == ["kernel"]
    assert jit.JITFunction.run is before


def test_other_threads_go_on_launching(launched: list[str]) -> None:
    def work() -> None:
        other = threading.Thread(target=launch, args=("theirs",))
        other.start()
        other.join()
        launch("ours")

    with announced_by(work):
        announce()
    assert launched == ["theirs"]


def test_what_fails_in_an_announcement_is_not_reported(launched: list[str]) -> None:
    before = jit.JITFunction.run

    def work() -> None:
        raise RuntimeError("nothing has been computed")

    with announced_by(work):
        announce()
    assert not is_announcing()
    assert jit.JITFunction.run is before


def test_only_an_announcement_may_be_wrong(launched: list[str]) -> None:
    expect(True, "is right")
    with pytest.raises(WrongResult, match="wrong"):
        expect(False, "is wrong")
    passed = []

    def work() -> None:
        expect(False, "has not been computed")
        passed.append(True)

    with announced_by(work):
        announce()
    assert passed == [True]


def test_no_verdict_comes_from_an_announcement(launched: list[str]) -> None:
    """A trial inside one would find nothing wrong."""
    route = routes.Route(
        name="unsound", package="json", instead="", cost="", trial=lambda _: expect(False, "wrong")
    )
    found: list[Any] = []
    with announced_by(lambda: found.append(route._try(torch.device("cpu")))):
        announce()
    assert found == []
    assert route._try(torch.device("cpu")) == "WrongResult: wrong"
