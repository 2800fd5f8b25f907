"""Inputs without a batch axis are found out, also where their length equals the batch size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipping.compare import assert_exact, assert_same_sums, oracle, run, total_norm
from clipping.tiny_models import Inputs, bert_classifier
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


class Positions(nn.Module):
    """Adds position embeddings the way small GPTs do, with ids of shape (T,)."""

    def __init__(self, how: str = "add") -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.positions = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 3)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        where = self.positions(torch.arange(ids.shape[1]))
        if self.how == "unsqueeze":
            where = where.unsqueeze(0)
        return self.head(torch.tanh(self.tokens(ids) + where))


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["ids"]).square().flatten(1).sum(1)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_one_dimensional_position_ids(length: int) -> None:
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(9, (4, length))}
    assert_exact(Positions().double(), losses, inputs)


SHAPES = [(4, 1), (1, 1), (3, 4), (2, 3), (1, 2), (1, 4), (4, 4), (4, 2)]
FIRST = [
    *[(shape, False) for shape in SHAPES],
    pytest.param((4, 1), True, marks=pytest.mark.slow),
    pytest.param((3, 4), True, marks=pytest.mark.slow),
]


def exact_batches(
    model: nn.Module, first: tuple[int, int], compiled: bool, eager_first: bool
) -> int:
    """How many of several batches, one after the other through one engine, were not refused.

    All of these are compared with the oracle.
    """
    torch.manual_seed(0)
    engine = ClippingEngine(model, clip_norm=0.3)
    torch._dynamo.reset()
    called = torch.compile(model, backend="eager") if compiled else model
    exact = 0
    for number, shape in enumerate([first, (4, 4), (3, 3), (5, 3), (3, 5), (1, 3), (2, 2)]):
        inputs = {"ids": torch.randint(9, shape)}
        expected = oracle(model, losses, inputs, 0.3)
        engine.reset()
        try:
            with engine:
                is_eager = eager_first and number == 0
                engine.backward(losses(model if is_eager else called, inputs))
        except (UnsupportedModuleError, ValueError):
            continue
        exact += 1
        torch.testing.assert_close(engine.sample_norms, expected.sample_norms, rtol=1e-9, atol=0.0)
        assert_same_sums(engine.clipped_sum(), expected.clipped_sum, 1e-9)
    return exact


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("first", "compiled"), FIRST)
def test_position_ids_are_told_from_samples_whatever_came_first(
    first: tuple[int, int], compiled: bool
) -> None:
    # A first batch that leaves it open is refused when compiled; see `test_compile`.
    assert exact_batches(Positions().double(), first, compiled, eager_first=True) == 7


class Distances(nn.Module):
    """Adds a bias per head for every distance, by ids of shape (T, T), as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.distances = nn.Embedding(9, 6)

    def forward(self, ids: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1])
        bias = self.distances((where[:, None] - where).abs())
        return (self.tokens(ids).unsqueeze(1) * bias).sum(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("first", "compiled"), FIRST)
def test_ids_of_two_axes_without_batch_are_exact_or_refused(
    first: tuple[int, int], compiled: bool
) -> None:
    exact = exact_batches(Distances().double(), first, compiled, eager_first=False)
    assert exact >= 5 or 1 in first or compiled


def test_position_ids_that_later_come_one_row_per_sample_are_refused() -> None:
    class Given(Positions):
        def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
            where = torch.arange(ids.shape[1]) if where is None else where
            return self.head(torch.tanh(self.tokens(ids) + self.positions(where)))

    ids = torch.randint(9, (4, 3))
    where = torch.arange(3).expand(4, 3)
    model = Given()
    engine = ClippingEngine(model)
    with engine:
        engine.backward(model(ids).square().sum((1, 2)))
        with pytest.raises(UnsupportedModuleError, match="positions: expected an input whose"):
            model(ids, where)
    # The other way round, (1, T) and then (B, T), each sample has its own row both times.
    engine = ClippingEngine(model)
    for given in (where[:1], where):
        engine.reset()
        with engine:
            engine.backward(model(ids, given).square().sum((1, 2)))
        expected = oracle(model, losses, {"ids": ids}, 1.0)
        torch.testing.assert_close(engine.sample_norms, expected.sample_norms)


@pytest.mark.parametrize("batch", [3, 4])
def test_a_refusal_is_not_forgotten(batch: int) -> None:
    """A table of T rows looks like the batch with one sample more if that has T samples."""
    engine = ClippingEngine(TableThroughLinear())
    for size in (batch, 4, 4):
        with pytest.raises(UnsupportedModuleError, match="mix: expected an input"):
            run(engine, losses, {"ids": torch.randn(size, 4, 6)})


def test_a_lookup_that_is_not_just_broadcast_is_refused() -> None:
    engine = ClippingEngine(Positions("unsqueeze"))
    with pytest.raises(
        UnsupportedModuleError,
        match=r"without batch axis|whatever the others are",
    ):
        run(engine, losses, {"ids": torch.randint(9, (4, 4))})


class TableThroughLinear(nn.Module):
    """A linear map of a fixed (T, D) table, shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.randn(4, 6))
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mix(self.table)


@pytest.mark.parametrize("batch", [3, 4])
def test_a_linear_map_without_batch_axis_is_refused_whatever_the_batch_size(batch: int) -> None:
    engine = ClippingEngine(TableThroughLinear())
    with pytest.raises(UnsupportedModuleError, match="mix"):
        run(
            engine,
            lambda m, i: m(i["x"]).square().flatten(1).sum(1),
            {"x": torch.randn(batch, 4, 6)},
        )


def test_batch_on_the_second_axis_is_refused_even_for_square_inputs() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # (T, B, E)
    engine = ClippingEngine(layer)
    with pytest.raises(UnsupportedModuleError):
        run(engine, lambda m, i: m(i["x"]).square().sum((0, 2)), {"x": torch.randn(4, 5, 4)})


def test_ids_one_per_sample_are_left_alone() -> None:
    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = nn.Embedding(9, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.users(ids)

    assert_exact(Users().double(), losses, {"ids": torch.tensor([1, 2, 2, 5])})


def test_the_check_leaves_modes_buffers_and_random_state_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.drop = nn.Dropout(0.5)
            self.calls = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.drop(self.layer(x))

    model = Counting()
    model.layer.eval()
    torch.manual_seed(0)
    wanted = model(torch.ones(2, 3))
    torch.manual_seed(0)
    with ClippingEngine(model):
        got = model(torch.ones(2, 3))
    assert torch.equal(got, wanted)
    assert model.calls == 2
    assert model.training
    assert not model.layer.training


def test_the_check_runs_once() -> None:
    case = bert_classifier()
    engine = ClippingEngine(case.model)
    calls = []
    case.model.classifier.register_forward_pre_hook(lambda *_: calls.append(1))
    run(engine, case.losses, case.inputs)
    first = len(calls)
    assert first > 1
    for _ in range(2):
        run(engine, case.losses, case.inputs)
    assert len(calls) == first + 2


def test_a_batch_of_one_beside_a_longer_mask_stays_a_batch_of_one() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return mask @ self.layer(x)

    model = Masked()
    engine = ClippingEngine(model, clip_norm=0.1)
    with engine:
        model(torch.randn(1, 5, 4), torch.ones(5, 5).tril()).square().sum().backward()
    assert engine.sample_norms.shape == (1,)
    assert total_norm(engine.clipped_sum()) <= 0.1 * (1 + 1e-6)


def test_a_batch_of_one_behind_another_tensor_is_not_multiplied() -> None:
    class MaskFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, mask: Tensor, x: Tensor) -> Tensor:
            return mask @ self.layer(x)

    model = MaskFirst()
    with ClippingEngine(model), pytest.raises(UnsupportedModuleError, match="samples first"):
        model(torch.ones(5, 5).tril(), torch.randn(1, 5, 4))
