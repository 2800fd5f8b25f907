"""Small captures in stable places: the same for the next batch alike, with the same numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from clipping.tiny_models import CASES
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry
from shuffled_dpsgd.clipping.capture.captures import (
    Capture,
    CopyGradients,
    InputAndGradient,
    Projection,
    StoredGradients,
    StoredWeight,
    UnsummedNorm,
)
from shuffled_dpsgd.clipping.replay import stable_places
from shuffled_dpsgd.clipping.replay.recordings import Places, places_of
from shuffled_dpsgd.clipping.replay.stable_places import StablePlaces
from shuffled_dpsgd.clipping.settle.schedules import WholeGradient


def batch_of(*captures: Capture, waiting: UnsummedNorm | None = None) -> CapturedBatch:
    batch = CapturedBatch(size=2, device="cpu", slots=1, scale=1.0)
    # Nothing is asked of slots.
    filed = [Entry(None, capture) for capture in captures]  # type: ignore[arg-type]
    batch.settling.entries[0] = filed
    if waiting is not None:
        batch.settling.unsummed = [Entry(None, waiting)]  # type: ignore[arg-type]
    return batch


def of(*tensors: Tensor) -> CapturedBatch:
    return batch_of(*(CopyGradients(0, tensor) for tensor in tensors))


def captures(batch: CapturedBatch) -> list[Capture]:
    return [entry.capture for entry in batch.settling.all_entries()]


def tensors(batch: CapturedBatch) -> list[Tensor]:
    return [tensor for capture in captures(batch) for tensor in capture.tensors()]


def places(batch: CapturedBatch) -> Places:
    return places_of(captures(batch), [])


def some(batch_size: int) -> CapturedBatch:
    ids = torch.randint(9, (1, 3)).expand(batch_size, 3)
    norm = UnsummedNorm(x_BTD=torch.randn(batch_size, 3, 5), g_BTD=torch.randn(2, 3), eps=1e-5)
    grads = torch.randn(batch_size, 7).bfloat16()
    squares, other = torch.randn(batch_size), torch.randn(batch_size, 2)
    return batch_of(
        InputAndGradient(grads, ids),
        InputAndGradient(None, other),
        Projection(2, other, grads),
        StoredGradients(grads, None, squares),
        StoredWeight(other, grads, None, 3),
        CopyGradients(1, grads),
        waiting=norm,
    )


def test_batches_alike_lie_alike_wherever_they_lay_before() -> None:
    stable, found = StablePlaces(), {}
    batches = [(size, some(size)) for size in (2, 3, 2, 3, 2)]
    assert places(batches[0][1]) != places(batches[2][1])
    stable.move(some(4))
    for size, batch in batches:
        stable.move(batch)
        found.setdefault(size, set()).add(places(batch))
    assert {size: len(seen) for size, seen in found.items()} == {2: 1, 3: 1}


def test_values_stay_what_they_were() -> None:
    stable = StablePlaces()
    for size in (2, 6, 3, 0, 2):
        batch = some(size)
        kinds = [capture.kind for capture in captures(batch)]
        before = [(tensor, tensor.clone()) for tensor in tensors(batch)]
        stable.move(batch)
        after = tensors(batch)
        assert [capture.kind for capture in captures(batch)] == kinds
        for (tensor, value), copy in zip(before, after, strict=True):
            assert copy is not tensor or size == 0
            assert torch.equal(value, copy)
            assert (value.dtype, value.shape) == (copy.dtype, copy.shape)
        # A tensor that stands in two entries still is one, for kernels ask.
        assert after[0] is after[4] is after[5]


def test_what_is_large_or_a_part_of_something_stays_where_it_is() -> None:
    large = torch.zeros(stable_places.SMALL_BYTES // 4 + 1)
    part = torch.zeros(4, 5, 6)[:, 0]
    batch = of(large, part)
    StablePlaces().move(batch)
    assert tensors(batch)[0] is large
    assert tensors(batch)[1] is part


def test_there_is_room_for_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stable_places, "MAX_BYTES", 2048)
    before = [torch.full((128,), float(i)) for i in range(6)]
    batch = of(*before)
    StablePlaces().move(batch)
    moved = [copy is not tensor for copy, tensor in zip(tensors(batch), before, strict=True)]
    assert moved == [True] * 4 + [False] * 2
    assert all(map(torch.equal, tensors(batch), before))


def test_views_of_few_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stable_places, "MAX_LAYOUTS", 3)
    stable = StablePlaces()
    for size in range(9, 1, -1):
        stable.move(of(torch.randn(size)))
    assert len(stable._layouts) == 3


@pytest.mark.parametrize("name", sorted(CASES))
def test_sums_of_real_models_are_the_same_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]()

    def settled() -> tuple[Tensor, dict[str, Tensor]]:
        engine = ClippingEngine(case.model, clip_norm=0.1)
        for _ in range(2):
            with engine:
                engine.backward(case.losses(case.model, case.inputs))
        return engine.sample_norms, engine.clipped_sum()

    expected_norms, expected = settled()
    moved: list[CapturedBatch] = []

    def move(schedule: WholeGradient, batch: CapturedBatch, new: bool) -> None:
        schedule.stable_places.move(batch)
        moved.append(batch)

    monkeypatch.setattr(WholeGradient, "_may_replay", lambda schedule, batch: True)
    monkeypatch.setattr(WholeGradient, "_places", move)
    norms, sums = settled()
    assert len(moved) == 2
    assert torch.equal(norms, expected_norms)
    assert all(torch.equal(sums[key], expected[key]) for key in expected)


class Pooled(nn.Module):
    """A head on the first token, as BERT has it: its captures are small."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(503, 256)
        self.norm = nn.LayerNorm(256)
        self.middle = nn.Linear(256, 256)
        self.head = nn.Linear(256, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.table(ids)).tanh())[:, 0])


@pytest.mark.gpu
def test_steps_are_replayed_whatever_else_takes_small_memory() -> None:
    torch.manual_seed(0)
    model = Pooled().cuda()
    engine = ClippingEngine(model, clip_norm=0.1)
    draw, kept = random.Random(0), []
    for _ in range(16):  # the referee's comparisons of the first steps are not replayed
        # Somebody keeps something small at every step, of ever other sizes.
        kept += [
            torch.empty(draw.randint(1, 4000), device="cuda") for _ in range(draw.randint(1, 9))
        ]
        ids = torch.randint(503, (32, 128), device="cuda")
        engine.reset()
        with engine:
            with torch.autocast("cuda", torch.bfloat16):
                losses = nn.functional.cross_entropy(
                    model(ids).float(), ids[:, 1] % 2, reduction="none"
                )
            engine.backward(losses)
        kept.append(engine.sample_norms)
        assert all(total.isfinite().all() for total in engine.clipped_sum().values())
    assert engine.num_replayed >= 8


@pytest.mark.gpu
def test_another_stream_has_other_places() -> None:
    stable = StablePlaces()
    here, there = (of(torch.randn(3, 7, device="cuda")) for _ in range(2))
    stable.move(here)
    with torch.cuda.stream(torch.cuda.Stream()):
        stable.move(there)
    assert tensors(here)[0].data_ptr() != tensors(there)[0].data_ptr()
