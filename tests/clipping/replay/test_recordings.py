"""Settling by replay: when work is recorded, when it is replayed, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.capture.captures import CopyGradients, InputAndGradient, UnsummedNorm
from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table, holding
from shuffled_dpsgd.clipping.replay.recordings import (
    MAX_RECORDINGS,
    MAX_SEEN,
    GraphRecorder,
    Replays,
    Work,
    places_of,
)
from shuffled_dpsgd.clipping.settle.schedules import WholeGradient
from shuffled_dpsgd.runtime.cuda_graphs import CaptureFailed


class FakeRecorder:
    """Stands in for CUDA graphs: a recording does the work again."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, work: Work) -> FakeRecording:
        self.made += 1
        return FakeRecording(work)


class FakeRecording:
    def __init__(self, work: Work) -> None:
        self.replay = work


def test_work_is_done_then_recorded_then_replayed() -> None:
    recorder = FakeRecorder()
    replays = Replays(recorder)
    done: list[int] = []

    def work(number: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            done.append(number)
            return torch.tensor(number)

        return run

    assert [int(replays.run(("here",), work(n))) for n in range(4)] == [0, 1, 1, 1]
    assert (recorder.made, replays.replayed) == (1, 3)
    assert int(replays.run(("elsewhere",), work(9))) == 9
    assert int(replays.run(None, work(7))) == 7
    assert recorder.made == 1


def test_only_so_many_recordings_are_kept() -> None:
    recorder = FakeRecorder()
    replays = Replays(recorder)
    for _ in range(2):
        for place in range(MAX_RECORDINGS + 1):
            replays.run((place,), lambda: torch.zeros(()))
    assert recorder.made == 0
    for _ in range(2):
        replays.run((0,), lambda: torch.zeros(()))
    assert recorder.made == 1


def test_places_seen_once_push_no_recording_out() -> None:
    recorder = FakeRecorder()
    replays = Replays(recorder)
    for step in range(4 * MAX_SEEN):
        for places in ("full batch",), (f"the rest of a batch at step {step}",):
            replays.run(places, lambda: torch.zeros(()))
    assert (recorder.made, replays.replayed) == (1, 4 * MAX_SEEN - 1)


def test_a_recording_that_fails_is_reported_and_the_work_done_all_the_same() -> None:
    def refuse(work: Work) -> FakeRecording:
        raise CaptureFailed("operation not permitted when stream is capturing")

    replays = Replays(refuse)
    replays.run(("here",), lambda: torch.zeros(()))
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*not permitted"):
        assert int(replays.run(("here",), lambda: torch.tensor(3))) == 3
    assert int(replays.run(("here",), lambda: torch.tensor(4))) == 4


def test_replays_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHUFFLED_DPSGD_CUDA_GRAPHS", "0")
    recorder = FakeRecorder()
    replays = Replays(recorder)
    for _ in range(3):
        replays.run(("here",), lambda: torch.zeros(()))
    assert recorder.made == 0


def test_a_place_is_all_that_a_launch_depends_on() -> None:
    tensor = torch.zeros(4, 6)
    place = places_of([], [tensor])
    others = [tensor.T, tensor[:, :3], tensor[1:], tensor.view(6, 4), tensor.view(torch.int32)]
    assert place == places_of([], [tensor.view(4, 6)])
    assert all(places_of([], [other]) != place for other in others)
    assert places_of([], [tensor], 1) != place != places_of([], [tensor, None])
    assert places_of([], [tensor, None]) != places_of([], [None, tensor])


def test_the_place_of_a_capture_is_of_its_kind_and_constants() -> None:
    tensor = torch.zeros(4, 6)
    norm = UnsummedNorm(x_BTD=tensor, g_BTD=tensor, eps=1e-5)
    assert places_of([norm], []) == places_of([replace(norm)], [])
    assert places_of([norm], []) != places_of([replace(norm, eps=1e-6)], [])
    assert places_of([norm], []) != places_of([InputAndGradient(tensor, tensor)], [])
    copies = [CopyGradients(part, tensor) for part in (0, 1)]
    assert places_of(copies[:1], []) != places_of(copies[1:], [])


def test_held_tables_are_kept_and_found_again() -> None:
    tensors = [torch.zeros(3), torch.zeros(5)]
    tables: dict[tuple[tuple[int, ...], ...], tuple[Tensor, ...]] = {}
    with holding(tables):
        (first,) = address_table([tensors], torch.device("cpu"))
        assert first.tolist() == [tensor.data_ptr() for tensor in tensors]
        assert address_table([tensors], torch.device("cpu"))[0] is first
    assert list(tables) == [(tuple(tensor.data_ptr() for tensor in tensors),)]


def blocks() -> nn.Module:
    """Linear and norm layers only: the backward of attention need not repeat itself bit for bit."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 5003)).cuda()


def gpu_step(engine: ClippingEngine, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    engine.reset()
    for part in x.split(4):
        with engine:
            with torch.autocast("cuda", torch.bfloat16):
                losses = engine.model(part).float().square().sum((1, 2))
            engine.backward(losses)
    # To the host, because results kept on the device would shift every later allocation.
    return engine.sample_norms.cpu(), {k: v.cpu() for k, v in engine.clipped_sum().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [24, 128, 197, 600])
def test_replayed_steps_equal_others_bit_for_bit(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.randn(8, tokens, 64, device="cuda") for _ in range(10)]
    batches[8][2] = float("inf")
    replaying = ClippingEngine(blocks(), clip_norm=0.1)
    got = [gpu_step(replaying, batch) for batch in batches]
    assert replaying.num_replayed >= 4
    monkeypatch.setenv("SHUFFLED_DPSGD_CUDA_GRAPHS", "0")
    ordinary = ClippingEngine(blocks(), clip_norm=0.1)
    wanted = [gpu_step(ordinary, batch) for batch in batches]
    assert ordinary.num_replayed == 0
    for (norms, sums), (expected_norms, expected) in zip(got, wanted, strict=True):
        assert torch.equal(norms.nan_to_num(), expected_norms.nan_to_num())
        assert all(torch.equal(sums[name], expected[name]) for name in expected)
        assert all(total.isfinite().all() for total in sums.values())


@pytest.mark.gpu
def test_sums_handed_out_stay_as_they_are_while_replays_go_on() -> None:
    engine = ClippingEngine(blocks(), clip_norm=0.1)
    batch = torch.randn(4, 32, 64, device="cuda")
    for _ in range(3):
        gpu_step(engine, batch)
    held = engine.clipped_sum()
    before = {name: total.clone() for name, total in held.items()}
    for _ in range(3):
        gpu_step(engine, 2.0 * batch)
    assert all(torch.equal(held[name], before[name]) for name in before)


@pytest.mark.gpu
def test_graphs_are_recorded_anew_after_all_others_are_gone() -> None:
    source = torch.arange(1000.0, device="cuda")
    recorder = GraphRecorder()
    for factor in range(2, 6):
        recording = recorder(lambda factor=factor: source * factor + 1.0)
        assert torch.equal(recording.replay(), source * factor + 1.0)
        del recording
    assert torch.nn.functional.dropout(source, 0.5).isfinite().all()


@pytest.mark.gpu
def test_dropout_goes_on_after_a_recording_that_failed() -> None:
    source = torch.ones(1000, device="cuda")
    # Waiting for the device is forbidden while its work is recorded, and spoils the recording.
    with pytest.raises(CaptureFailed):
        GraphRecorder()(lambda: source * float((2 * source).sum()))
    first, second = (torch.nn.functional.dropout(source, 0.5) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal((source + source).cpu(), torch.full((1000,), 2.0))


@pytest.mark.gpu
def test_batches_of_ever_other_sizes_are_trained_with_dropout() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.LayerNorm(64), nn.Linear(64, 64))
    engine = ClippingEngine(model.cuda(), clip_norm=0.1)
    sizes = torch.randint(1, 12, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for size in [*sizes, *[4] * 6]:
        engine.reset()
        with engine:
            losses = model(torch.randn(size, 7, 64, device="cuda")).square().sum((1, 2))
            engine.backward(losses)
        assert all(total.isfinite().all() for total in engine.clipped_sum().values())
    assert isinstance(engine._schedule, WholeGradient)
    assert engine._schedule.replays.enabled
    assert engine.num_replayed >= 2
