"""Norms on the host: the same as ever, and on a GPU before the sums are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.replay.early_norms import Announcement, EarlyNorms, announce
from shuffled_dpsgd.clipping.replay.recordings import Replays, Work
from shuffled_dpsgd.clipping.settle import schedules
from shuffled_dpsgd.clipping.settle.many_layers import ManyLayers

# About a tenth of a second of an H200 for the norms, and three tenths for the sums.
NORM_CYCLES, SUM_CYCLES = 200_000_000, 600_000_000
# Norms must be read early so often, within so many steps. On a busy machine the host may come late
# to some of them, after the sums, which says nothing of the code.
ENOUGH, MOST_STEPS = 4, 30


def test_norms_of_all_batches_come_with_what_was_asked_for() -> None:
    norms = EarlyNorms()
    assert norms.read([])[0].numel() == 0
    norms.add(torch.tensor([1.0, 2.0]))
    norms.add(torch.tensor([3.0]), announce(torch.tensor([3.0])))
    found, other = norms.read([torch.tensor(7.0)])
    assert (found.tolist(), other.item()) == ([1.0, 2.0, 3.0], 7.0)
    norms.clear()
    assert norms.read([])[0].numel() == 0


def test_an_engine_reads_its_norms() -> None:
    engine = ClippingEngine(nn.Linear(3, 2), clip_norm=1.0)
    for size in (2, 3):
        with engine:
            engine.backward(engine.model(torch.randn(size, 3)).square().sum(1))
    found, other = engine.read_norms(torch.tensor(1.5))
    assert torch.equal(found, engine.sample_norms)
    assert (len(found), other.item()) == (5, 1.5)


def test_a_replay_announces_what_its_recording_did() -> None:
    class Recording:
        def __init__(self, work: Work) -> None:
            self.replay: Work = lambda: torch.zeros(())
            work()

    replays = Replays(Recording)
    announced: Any = iter(("done", "recorded"))

    def work() -> Tensor:
        replays.announced = next(announced)
        return torch.zeros(())

    seen = []
    for _ in range(4):
        replays.run(("here",), work)
        seen.append(replays.take_announced())
    assert seen == ["done", "recorded", "recorded", "recorded"]
    replays.run(None, lambda: torch.zeros(()))
    assert replays.take_announced() is None


def test_norms_are_freed_when_an_engine_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept beyond a step shifts the memory of the next, and nothing is replayed."""
    announced: list[weakref.ref[Tensor]] = []

    def noted(norms_B: Tensor) -> Announcement:
        announced.append(weakref.ref(norms_B))
        return Announcement(norms_B, mock.Mock())

    monkeypatch.setattr(schedules, "announce", noted)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    engine = ClippingEngine(nn.Linear(3, 2), clip_norm=1.0)
    with engine:
        engine.backward(engine.model(torch.randn(2, 3)).square().sum(1))
    assert announced[0]() is not None
    engine.reset()
    assert announced[0]() is None


def slowed(method: Callable[..., Any], cycles: int) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(cycles)
        return method(*args, **kwargs)

    return slow


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["0", "1"])
def test_norms_are_read_while_sums_are_still_added(
    graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHUFFLED_DPSGD_CUDA_GRAPHS", graphs)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    engine = ClippingEngine(model, clip_norm=0.1)
    first, second = (torch.randn(4, 8, 64, device="cuda") for _ in range(2))
    # Both are slowed down, in recordings too: reading too early would find the norms before these.
    monkeypatch.setattr(ManyLayers, "squares", slowed(ManyLayers.squares, NORM_CYCLES))
    monkeypatch.setattr(ManyLayers, "add_sums", slowed(ManyLayers.add_sums, SUM_CYCLES))
    times_early = 0
    for step in range(MOST_STEPS):
        replayed_before = engine.num_replayed
        engine.reset()
        other = torch.full((), float(step), device="cuda")
        for batch in (first, (1.0 + step) * second):
            with engine:
                engine.backward(model(batch).square().sum((1, 2)))
        norms, read = engine.read_norms(other)
        is_early = not torch.cuda.current_stream().query()
        assert torch.equal(norms, engine.sample_norms.cpu())
        assert read.item() == step
        # The first batches are checked, which waits for everything; then come recordings.
        is_replayed = engine.num_replayed > replayed_before
        times_early += is_early and is_replayed == (graphs == "1")
        if times_early == ENOUGH:
            break
    assert times_early == ENOUGH
    assert (engine.num_replayed > 0) == (graphs == "1")


@pytest.mark.gpu
def test_norms_are_read_from_another_stream_too() -> None:
    model = nn.Linear(64, 64).cuda()
    engine = ClippingEngine(model, clip_norm=0.1)
    with engine:
        engine.backward(model(torch.randn(4, 64, device="cuda")).square().sum(1))
    expected = engine.sample_norms.cpu()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        (norms,) = engine.read_norms()
    assert torch.equal(norms, expected)
