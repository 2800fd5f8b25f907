"""A backend serves if its probe passes, which is made once; a failure is said once."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from shuffled_dpsgd.runtime import backends, notices
from shuffled_dpsgd.runtime.backends import Backend, WrongResult, expect_close, triton_available

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been probed yet."""
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(backends, "_reasons", {})
    monkeypatch.setattr(backends, "TAKEN", defaultdict(set))
    monkeypatch.setattr(notices, "_said", set())


def backend(probe: Callable[[torch.device], None]) -> Backend:
    return Backend(
        name="A fast way",
        instead="A slow way serves",
        cost="it is slow",
        probe=probe,
    )


def test_a_probe_is_made_once_in_a_process() -> None:
    tried: list[torch.device] = []
    assert backend(tried.append).serves(CPU)
    assert backend(tried.append).serves(CPU)
    assert tried == [CPU]


def test_a_backend_may_be_switched_off_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setenv("SHUFFLED_DPSGD_WITHOUT", "Another,A fast way")
    assert not backend(tried.append).serves(CPU)
    assert tried == []
    assert "SHUFFLED_DPSGD_WITHOUT" in backends.switched_off()["A fast way"]


def test_threads_that_ask_at_once_wait_for_one_probe() -> None:
    tried: list[torch.device] = []
    started = threading.Barrier(4, timeout=10)
    shared = backend(tried.append)
    answers: list[bool] = []

    def ask() -> None:
        started.wait()
        answers.append(shared.serves(CPU))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tried, answers) == ([CPU], [True] * 4)


@pytest.mark.parametrize("error", [WrongResult("off by 3"), AttributeError("no thread_barrier")])
def test_a_backend_that_fails_is_off_with_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise error

    for _ in range(2):
        with pytest.warns(RuntimeWarning) as caught:
            assert [backend(fail).serves(CPU), backend(fail).serves(CPU)] == [False, False]
        (warning,) = caught
        for words in ("A fast way is off", str(error), "A slow way serves", "it is slow"):
            assert words in str(warning.message)
        assert backends.switched_off() == {"A fast way": f"{type(error).__name__}: {error}"}
        forget(monkeypatch)


def test_a_failed_probe_stops_nothing_where_warnings_are_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(device: torch.device) -> None:
        raise WrongResult("off by 3")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend(fail).serves(CPU)
    assert "off by 3" in caplog.text


def test_running_out_of_memory_says_nothing() -> None:
    def fail(device: torch.device) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        backend(fail).serves(CPU)
    assert backend(lambda device: None).serves(CPU)


def test_a_probe_ignores_its_caller_s_settings() -> None:
    def look(device: torch.device) -> None:
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", torch.bfloat16):
        assert backend(look).serves(CPU)


def test_results_are_compared_with_the_largest_number_expected() -> None:
    expected = torch.tensor([100.0, 0.0])
    expect_close(torch.tensor([100.0, 0.09]), expected, rtol=1e-3)
    for wrong in (torch.tensor([100.0, 0.2]), torch.tensor([float("nan"), 0.0])):
        with pytest.raises(WrongResult):
            expect_close(wrong, expected, rtol=1e-3)


def test_what_ran_is_reported() -> None:
    backends.TAKEN["sums"].add("plain")
    backends.TAKEN["sums"].add("host")
    backends.TAKEN["noise"].add("box_muller")
    assert backends.report() == {
        "taken": {"noise": ("box_muller",), "sums": ("host", "plain")},
        "off": {},
    }


@pytest.mark.parametrize(("value", "installed"), [("1", True), ("1", False), ("0", True)])
def test_triton_is_used_if_installed_and_not_switched_off(
    value: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_available.cache_clear()
    monkeypatch.setenv("SHUFFLED_DPSGD_TRITON", value)
    spec = importlib.util.find_spec("torch") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert triton_available() == (installed and value == "1")
    monkeypatch.undo()
    triton_available.cache_clear()
