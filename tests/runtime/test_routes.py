"""A route serves if its trial passes; the verdict is remembered, and a failure is said once."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.runtime import notices, routes, verdicts
from shuffled_dpsgd.runtime.routes import Route, WrongResult, expect_close

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty memory, on disk and in the process."""
    monkeypatch.setenv("SHUFFLED_DPSGD_CACHE", str(tmp_path))
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(routes, "_reasons", {})
    monkeypatch.setattr(routes, "_taken", {})
    monkeypatch.setattr(notices, "_said", set())


def route(trial: Callable[[torch.device], None]) -> Route:
    return Route(
        name="A fast way",
        package="shuffled_dpsgd.runtime",
        instead="A slow way serves",
        cost="it is slow",
        trial=trial,
    )


def test_a_trial_is_made_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    for _ in range(2):
        assert route(tried.append).serves(CPU)
        assert route(tried.append).serves(CPU)
        forget(monkeypatch)
    assert tried == [CPU]


def test_threads_that_ask_at_once_wait_for_one_trial() -> None:
    tried: list[torch.device] = []
    started = threading.Barrier(4, timeout=10)
    shared = route(tried.append)
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
def test_a_route_that_fails_is_off_with_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise error

    for _ in range(2):
        with pytest.warns(RuntimeWarning) as caught:
            assert [route(fail).serves(CPU), route(fail).serves(CPU)] == [False, False]
        (warning,) = caught
        for words in ("A fast way is off", str(error), "A slow way serves", "it is slow"):
            assert words in str(warning.message)
        assert routes.switched_off() == {"A fast way": f"{type(error).__name__}: {error}"}
        forget(monkeypatch)


def test_a_failed_trial_stops_nothing_where_warnings_are_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(device: torch.device) -> None:
        raise WrongResult("off by 3")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not route(fail).serves(CPU)
    assert "off by 3" in caplog.text


def test_running_out_of_memory_is_no_verdict() -> None:
    def fail(device: torch.device) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        route(fail).serves(CPU)
    assert route(lambda device: None).serves(CPU)


@pytest.mark.parametrize("changed", ["torch", "triton", "shuffled_dpsgd", "device"])
def test_other_versions_and_devices_are_tried_anew(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[torch.device] = []
    route(tried.append).serves(CPU)
    forget(monkeypatch)
    facts = verdicts.facts_of(CPU) | {changed: "another"}
    monkeypatch.setattr(verdicts, "facts_of", lambda device: facts)
    route(tried.append).serves(CPU)
    assert len(tried) == 2


def test_kernels_that_changed_are_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    route(tried.append).serves(CPU)
    forget(monkeypatch)
    monkeypatch.setattr(verdicts, "source_digest", lambda package: "another")
    route(tried.append).serves(CPU)
    assert len(tried) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"routes": 3}'])
def test_a_damaged_memory_is_no_memory(text: str, memory: Path) -> None:
    path = verdicts.Memory(CPU).path
    path.write_text(text)
    assert route(lambda device: None).serves(CPU)
    assert json.loads(path.read_text())["routes"]["A fast way"]["reason"] is None


def test_without_a_place_to_remember_routes_serve_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHUFFLED_DPSGD_CACHE", str(tmp_path / "file" / "below"))
    assert route(lambda device: None).serves(CPU)


def test_a_trial_ignores_its_caller_s_settings() -> None:
    def look(device: torch.device) -> None:
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", torch.bfloat16):
        assert route(look).serves(CPU)


def test_results_are_compared_with_the_largest_number_expected() -> None:
    expected = torch.tensor([100.0, 0.0])
    expect_close(torch.tensor([100.0, 0.09]), expected, rtol=1e-3)
    for wrong in (torch.tensor([100.0, 0.2]), torch.tensor([float("nan"), 0.0])):
        with pytest.raises(WrongResult):
            expect_close(wrong, expected, rtol=1e-3)


def test_what_ran_is_reported() -> None:
    routes.took("sums", "plain")
    routes.took("sums", "host")
    routes.took("noise", "box_muller")
    assert routes.report() == {
        "taken": {"noise": ("box_muller",), "sums": ("host", "plain")},
        "off": {},
    }
