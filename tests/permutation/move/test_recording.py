"""A recording issues launches first, records them once, and from then on replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from shuffled_dpsgd.permutation.move import recording
from shuffled_dpsgd.permutation.move.recording import Recording


class FakeCuda:
    """What a recording calls of torch, noting the order of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.capturing = False
        self.failing = False

    def capture_begin(self, **options: str) -> None:
        assert options == {"capture_error_mode": "thread_local"}
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")

    def replay(self) -> None:
        self.calls.append("replay")

    def launch(self) -> None:
        if self.failing:
            raise RuntimeError("launch failed")
        self.calls.append("launch")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    with mock.patch.multiple(
        torch.cuda,
        CUDAGraph=lambda: fake,
        Stream=lambda device: None,
        stream=lambda stream: nullcontext(),
        device=lambda device: nullcontext(),
        is_current_stream_capturing=lambda: fake.capturing,
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


def test_a_failed_capture_is_ended_and_raised(cuda: FakeCuda) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    recorded.run()
    cuda.failing = True
    with pytest.raises(RuntimeError, match="launch failed"):
        recorded.run()
    assert cuda.calls == ["launch", "begin", "end"]


def test_replaying_can_be_switched_off(cuda: FakeCuda) -> None:
    recorded = Recording(cuda.launch, torch.device("cuda"))
    with mock.patch.object(recording, "REPLAY", new=False):
        for _ in range(3):
            recorded.run()
    assert cuda.calls == ["launch"] * 3
