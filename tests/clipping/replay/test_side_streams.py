"""Work done beside other work: what runs where, in which order, and that results do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from clipping.tiny_models import CASES
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.replay import side_streams
from shuffled_dpsgd.clipping.replay.side_streams import side_by_side, using_side_streams
from shuffled_dpsgd.clipping.settle import many_layers


class FakeSideStreams:
    """Stands in for streams: writes down what was asked of it and of which stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"

    @contextmanager
    def aside(self, number: int) -> Iterator[None]:
        self.log.append(f"fork {number}")
        self.current = f"side {number}"
        try:
            yield
        finally:
            self.current = "main"

    def join(self) -> None:
        assert self.current == "main"
        self.log.append("join")

    def job(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.log.append(f"{name} on {self.current}")
            return name

        return run


def test_work_is_done_in_order_on_one_stream_unless_side_streams_are_given() -> None:
    fake = FakeSideStreams()
    lanes = [[fake.job("a"), fake.job("b")], [fake.job("c")], []]
    assert side_by_side(*lanes) == [["a", "b"], ["c"], []]
    assert fake.log == ["a on main", "b on main", "c on main"]


def test_sides_fork_before_the_main_stream_goes_on_and_all_join_before_results_are_used() -> None:
    fake = FakeSideStreams()
    with using_side_streams(fake):
        found = side_by_side([fake.job("a")], [fake.job("b"), fake.job("c")], [fake.job("d")])
    assert found == [["a"], ["b", "c"], ["d"]]
    sides = ["fork 0", "b on side 0", "c on side 0", "fork 1", "d on side 1"]
    assert fake.log == [*sides, "a on main", "join"]
    side_by_side([fake.job("e")], [fake.job("f")])
    assert fake.log[-2:] == ["e on main", "f on main"]


def test_a_job_has_one_stream() -> None:
    fake = FakeSideStreams()
    with using_side_streams(fake):
        inner = side_by_side([lambda: side_by_side([fake.job("a")], [fake.job("b")])], [list])
        assert inner == [[[["a"], ["b"]]], [[]]]
        assert fake.log == ["fork 0", "a on main", "b on main", "join"]
        side_by_side([fake.job("c")], [fake.job("d")])
    assert fake.log[-4:] == ["fork 0", "d on side 0", "c on main", "join"]


def test_side_streams_join_after_a_failure() -> None:
    fake = FakeSideStreams()

    def fail() -> str:
        raise RuntimeError("no")

    with using_side_streams(fake):
        for main, side in [(fail, fake.job("a")), (fake.job("a"), fail)]:
            with pytest.raises(RuntimeError, match="no"):
                side_by_side([main], [side])
            assert fake.log.pop() == "join"


@pytest.mark.parametrize(
    ("name", "lanes"), [("gpt2", 1), ("gpt2", 3), ("vit", 1), ("llama-tied", 2), ("gpt2-lora", 2)]
)
def test_sums_do_not_depend_on_what_is_done_first(
    name: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_layers, "LINEAR_LANES", lanes)
    case = CASES[name]()

    def settled(fake: FakeSideStreams | None) -> tuple[Tensor, dict[str, Tensor]]:
        engine = ClippingEngine(case.model, clip_norm=0.1)
        for _ in range(2):
            with engine:
                losses = case.losses(case.model, case.inputs)
                if fake is None:
                    engine.backward(losses)
                    continue
                with using_side_streams(fake):
                    engine.backward(losses)
        return engine.sample_norms, engine.clipped_sum()

    fake = FakeSideStreams()
    norms, sums = settled(fake)
    assert fake.log.count("join") == 4
    expected_norms, expected = settled(None)
    assert torch.equal(norms, expected_norms)
    assert all(torch.equal(sums[key], expected[key]) for key in expected)


class Tied(nn.Module):
    """A table that is also the head, and a norm, as at the ends of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5003, 64)
        self.norm = nn.LayerNorm(64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 5003, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids) + self.middle(self.table(ids))))


@pytest.mark.gpu
@pytest.mark.parametrize(("streams", "lanes"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_recorded_side_streams_on_a_gpu(
    streams: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_streams, "NUM_SIDE_STREAMS", streams)
    monkeypatch.setattr(many_layers, "LINEAR_LANES", lanes)
    batches = [torch.randint(5003, (4, 600), device="cuda") for _ in range(6)]

    def steps() -> tuple[list[tuple[Tensor, dict[str, Tensor]]], int]:
        torch.manual_seed(0)
        model = Tied().cuda()
        engine = ClippingEngine(model, clip_norm=0.1)
        found = []
        for ids in batches:
            engine.reset()
            with engine:
                with torch.autocast("cuda", torch.bfloat16):
                    losses = model(ids).float().square().sum((1, 2))
                engine.backward(losses)
            sums = {key: total.cpu() for key, total in engine.clipped_sum().items()}
            found.append((engine.sample_norms.cpu(), sums))
        return found, engine.num_replayed

    got, replayed = steps()
    assert replayed >= 2
    monkeypatch.setenv("SHUFFLED_DPSGD_CUDA_GRAPHS", "0")
    for (norms, sums), (expected_norms, expected) in zip(got, steps()[0], strict=True):
        torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=0.0)
        for key, total in expected.items():
            assert (sums[key] - total).norm() <= 1e-5 * total.norm()
