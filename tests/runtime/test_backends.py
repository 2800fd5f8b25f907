"""A backend serves if its probe passes; the outcome is kept, and a failure is said once."""

from __future__ import annotations

import importlib.util
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.runtime import backends, notices
from shuffled_dpsgd.runtime.backends import Backend, WrongResult, expect_close, triton_available

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, on disk and in the process."""
    monkeypatch.setenv("SHUFFLED_DPSGD_CACHE", str(tmp_path))
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(backends, "_reasons", {})
    monkeypatch.setattr(backends, "_taken", {})
    monkeypatch.setattr(notices, "_said", set())


def backend(probe: Callable[[torch.device], None]) -> Backend:
    return Backend(
        name="A fast way",
        package="shuffled_dpsgd.runtime",
        instead="A slow way serves",
        cost="it is slow",
        probe=probe,
    )


def test_a_probe_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    for _ in range(2):
        assert backend(tried.append).serves(CPU)
        assert backend(tried.append).serves(CPU)
        forget(monkeypatch)
    assert tried == [CPU]


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


@pytest.mark.parametrize("changed", ["torch", "triton", "shuffled_dpsgd", "device"])
def test_other_versions_and_devices_are_probed_anew(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[torch.device] = []
    backend(tried.append).serves(CPU)
    forget(monkeypatch)
    facts = backends.facts_of(CPU) | {changed: "another"}
    monkeypatch.setattr(backends, "facts_of", lambda device: facts)
    backend(tried.append).serves(CPU)
    assert len(tried) == 2


def test_kernels_that_changed_are_probed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    backend(tried.append).serves(CPU)
    forget(monkeypatch)
    monkeypatch.setattr(backends, "source_digest", lambda package: "another")
    backend(tried.append).serves(CPU)
    assert len(tried) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3"])
def test_a_damaged_cache_is_no_cache(text: str) -> None:
    probed: list[torch.device] = []
    fast = backend(probed.append)
    path = backends.probe_path(fast, CPU)
    path.write_text(text)
    assert fast.serves(CPU)
    assert probed == [CPU]
    assert json.loads(path.read_text()) == {"backend": "A fast way", "reason": None}


def test_without_a_place_for_the_cache_backends_serve_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHUFFLED_DPSGD_CACHE", str(tmp_path / "file" / "below"))
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
    backends.took("sums", "plain")
    backends.took("sums", "host")
    backends.took("noise", "box_muller")
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
