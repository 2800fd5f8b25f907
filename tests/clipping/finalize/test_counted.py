"""Samples that pad a batch contribute exactly nothing, whatever they hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping.compare import assert_same_sums, oracle
from clipping.tiny_models import Inputs, class_losses, token_ids
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.replay import Rerun

REAL, SIZE = 3, 5
POISONS = (math.nan, math.inf, 1e300)
STRATEGIES = ("bookkeeping", "mixed", "instantiate", "ghost")


class Small(nn.Module):
    """Every common kind of layer on floating-point inputs, which can hold any poison."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.top = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.bottom(x)))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.top(hidden)


def losses_of(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().mean((1, 2))


def padded(real: Inputs, poison: float) -> Inputs:
    x = torch.full((SIZE, *real["x"].shape[1:]), poison, dtype=torch.float64)
    x[:REAL] = real["x"]
    return {"x": x}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().double()


@pytest.fixture
def real() -> Inputs:
    return {"x": 5 * torch.randn(REAL, 4, 6, dtype=torch.float64)}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    ("strategy", "clip"),
    [*((s, "flat") for s in STRATEGIES), ("bookkeeping", "per-layer"), ("bookkeeping", "none"),
     ("bookkeeping", "automatic")],
)  # fmt: skip
def test_poisoned_padding_changes_nothing(
    model: nn.Module, real: Inputs, strategy: str, clip: str, poison: float
) -> None:
    engine = ClippingEngine(model, clip_norm=0.5, strategy=strategy, clip=clip)
    groups = [row.parameters for row in engine.plan()]
    wanted = oracle(model, losses_of, real, 0.5, clip=clip, groups=groups)
    inputs = padded(real, poison)
    with engine:
        engine.backward(losses_of(model, inputs), counted=REAL)
    torch.testing.assert_close(engine.sample_norms, wanted.sample_norms, rtol=1e-9, atol=0)
    assert engine.num_nonfinite == 0
    assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)


def test_hidden_positions_change_nothing() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        vocab_size=40, max_position_embeddings=24, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config).double()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[39] = 1e150
    real = token_ids(REAL, 6) | {"attention_mask": torch.ones(REAL, 6, dtype=torch.long)}
    wanted = oracle(model, class_losses, real, 0.1)
    engine = ClippingEngine(model, clip_norm=0.1, check_rate=1.0)
    ids = torch.full((SIZE, 16), 39)
    mask = torch.zeros(SIZE, 16, dtype=torch.long)
    ids[:REAL, :6], mask[:REAL, :6] = real["input_ids"], 1
    with engine:
        losses = class_losses(model, {"input_ids": ids, "attention_mask": mask})
        engine.backward(losses, counted=REAL)
    torch.testing.assert_close(engine.sample_norms, wanted.sample_norms, rtol=1e-9, atol=0)
    assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)
    assert engine.num_checked > 0


def test_checks_look_at_counted_samples_only(
    model: nn.Module, real: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ClippingEngine(model, check_rate=1.0)
    looked_at: list[tuple[int, int]] = []
    observe = Rerun.observe

    def noted(rerun: Rerun, order: list[int], kept: list[int], gradients: bool = True) -> Any:
        looked_at.extend((count, order[place]) for place in kept)
        assert set(order) <= set(range(count))
        return observe(rerun, order, kept, gradients)

    monkeypatch.setattr(Rerun, "observe", noted)
    for count in (1, 2, 3) * 8:
        inputs = padded(real, 1.0)
        with engine:
            engine.backward(losses_of(model, inputs), counted=count)
        engine.reset()
    assert all(sample < counted for counted, sample in looked_at)
    assert {sample for _, sample in looked_at} == {0, 1, 2}


@pytest.mark.parametrize("count", [0, -1, SIZE + 1])
def test_a_wrong_number_is_refused(model: nn.Module, real: Inputs, count: int) -> None:
    engine = ClippingEngine(model)
    with engine:
        losses = losses_of(model, padded(real, 0.0))
        with pytest.raises(InvalidArgumentError, match="from 1 to 5"):
            engine.backward(losses, counted=count)
