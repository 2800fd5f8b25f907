"""A recording issues launches first, records them once, and from then on replays."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from shuffled_dpsgd.permutation.move import recording
from shuffled_dpsgd.permutation.move.recording import Recording
from shuffled_dpsgd.runtime import notices


class FakeCuda:
    """What a recording calls of torch, noting the order of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.capturing = False
        self.failing = False
        self.broken = False
        self.recording = False

    def capture_begin(self, **options: str) -> None:
        assert options == {"capture_error_mode": "thread_local"}
        self.calls.append("begin")
        self.recording = True

    def capture_end(self) -> None:
        self.calls.append("end")
        self.recording = False

    def replay(self) -> None:
        self.calls.append("replay")

    def clone_state(self) -> None:
        """As a generator."""

    def graphsafe_set_state(self, state: None) -> None:
        """As a generator."""
        self.calls.append("repaired")

    def launch(self) -> None:
        if self.broken:
            raise RuntimeError("launch failed")
        if self.failing and self.recording:
            raise RuntimeError("capture refused")
        self.calls.append("launch")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    with (
        mock.patch.multiple(
            torch.cuda,
            CUDAGraph=lambda: fake,
            Stream=lambda device: SimpleNamespace(device=torch.device("cuda:0")),
            stream=lambda stream: nullcontext(),
            device=lambda device: nullcontext(),
            is_current_stream_capturing=lambda: fake.capturing,
            default_generators=(fake,),
        ),
        mock.patch.object(notices, "_said", set()),
    ):
        yield fake


def test_launches_are_recorded_once_and_replayed(cuda: FakeCuda) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    for _ in range(3):
        recorded.run()
    assert cuda.calls == ["launch", "begin", "launch", "end", "replay", "replay"]


def test_inside_a_foreign_capture_launches_are_issued(cuda: FakeCuda) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    recorded.run()
    recorded.run()
    cuda.calls.clear()
    cuda.capturing = True
    recorded.run()
    assert cuda.calls == ["launch"]


def test_after_a_failed_capture_launches_are_issued(cuda: FakeCuda) -> None:
    """Nothing escapes: an exception here would come between an update and its shuffle."""
    recorded = Recording(cuda.launch, torch.device("cuda"))
    recorded.run()
    cuda.failing = True
    with pytest.warns(RuntimeWarning, match="Shuffling goes on without CUDA graphs.*refused"):
        recorded.run()
    recorded.run()
    assert cuda.calls == ["launch", "begin", "end", "repaired", "launch", "launch"]


def test_a_failed_capture_stops_no_shuffle_where_warnings_are_errors(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    recorded.run()
    cuda.failing = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded.run()
    assert cuda.calls[-1] == "launch"
    assert "Shuffling goes on without CUDA graphs" in caplog.text


def test_launches_that_fail_by_themselves_are_an_error(cuda: FakeCuda) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    recorded.run()
    cuda.broken = True
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="launch failed"):
        recorded.run()


def test_replaying_can_be_switched_off(cuda: FakeCuda) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    with mock.patch.object(recording, "REPLAY", new=False):
        for _ in range(3):
            recorded.run()
    assert cuda.calls == ["launch"] * 3
