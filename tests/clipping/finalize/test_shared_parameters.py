"""Parameters that several calls share: tied weights, repeated modules, checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipping.compare import assert_exact, assert_same_sums, oracle, total_norm
from clipping.tiny_models import Inputs, gpt2
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.finalize import many_layers

STRATEGIES = ("bookkeeping", "ghost", "mixed", "instantiate")


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


class Repeated(nn.Module):
    """One of everything, called twice, the second time on what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.linear(self.norm(x)))
            x = x + self.attention(x, x, x, need_weights=False)[0]
            x = x + self.attention(x, x[:, :2], x[:, :2], need_weights=False)[0]
        return x


class RepeatedGain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain)


class TiedLinears(nn.Module):
    """Two linear maps share a weight but not their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedMixture(nn.Module):
    """A table used as an embedding, as a head, transposed in a Conv1D and in a generic module."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.table = nn.Embedding(5, 4, padding_idx=2)
        self.other = nn.Embedding(5, 4, padding_idx=0)
        self.head = nn.Linear(4, 5, bias=False)
        self.back = Conv1D(4, 5)
        self.odd = Twice()
        for module in (self.other, self.head, self.back, self.odd):
            module.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.other(ids.flip(1))
        return self.odd(torch.tanh(self.back(self.head(x))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (2 * self.weight.T)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", ["flat", "none"])
@pytest.mark.parametrize("model", [Repeated, TiedLinears, RepeatedGain])
def test_modules_called_more_than_once(
    model: Callable[[], nn.Module], strategy: str, clip: str
) -> None:
    torch.manual_seed(0)
    built = model()
    if isinstance(built, RepeatedGain):
        built = nn.Sequential(built, nn.Linear(4, 4), built)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    assert_exact(built.double(), losses, {"x": x}, strategy=strategy, clip=clip)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_weight_in_every_role(strategy: str) -> None:
    torch.manual_seed(1)
    model = TiedMixture().double()
    inputs = {"x": torch.randint(5, (3, 6))}
    assert_exact(model, losses, inputs, strategy=strategy)


def test_tied_head_has_one_entry_in_the_plan_and_the_sum() -> None:
    case = gpt2()
    engine = ClippingEngine(case.model)
    (row,) = [row for row in engine.plan() if "transformer.wte" in row.modules]
    assert row.modules == ("transformer.wte", "lm_head")
    assert "lm_head.weight" not in engine.clipped_sum()
    assert set(engine.clipped_sum()) == set(dict(case.model.named_parameters()))


def test_large_stored_gradients_of_a_tied_table_in_two_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many_layers, "_SMALL_ON_CPU", 8)
    case = gpt2()
    model = case.model.double()
    engine = ClippingEngine(model, clip_norm=0.1, strategy="instantiate")
    with engine:
        for some in (slice(0, 1), slice(1, None)):
            inputs = {name: value[some] for name, value in case.inputs.items()}
            engine.backward(case.losses(model, inputs))
    expected = oracle(model, case.losses, case.inputs, 0.1)
    torch.testing.assert_close(engine.sample_norms, expected.sample_norms, rtol=1e-9, atol=0.0)
    assert_same_sums(engine.clipped_sum(), expected.clipped_sum, 1e-9)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(self.table(ids))))
        return nn.functional.cross_entropy(logits.mT.float(), ids, reduction="none").sum(1)


@pytest.mark.gpu
def test_a_tied_head_stored_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(T: int, R: int, C: int, device: str, tied: bool = False) -> cost.NormMethod:
        return cost.NormMethod.INSTANTIATE if tied else cost.NormMethod.TILES

    monkeypatch.setitem(cost.STRATEGIES, "mixed", stored)
    torch.manual_seed(0)
    model = TiedHead().cuda()
    ids = torch.randint(512, (4, 70), device="cuda")

    def run(some: Tensor, strategy: str, clip: str) -> tuple[Tensor, dict[str, Tensor]]:
        engine = ClippingEngine(model, clip_norm=0.5, strategy=strategy, clip=clip)
        with engine, torch.autocast("cuda", torch.bfloat16):
            engine.backward(model(some))
        return engine.sample_norms, engine.clipped_sum()

    norms, sums = run(ids, "mixed", "none")
    expected_norms, expected = run(ids, "ghost", "none")
    torch.testing.assert_close(norms, expected_norms, rtol=1e-2, atol=0.0)
    assert_same_sums(sums, expected, 1e-5)
    for sample in ids:
        assert total_norm(run(sample[None], "mixed", "flat")[1]) <= 0.5 * (1 + 1e-6)
