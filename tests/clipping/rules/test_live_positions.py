"""Positions without a gradient: left out of norms and sums, changing neither."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from clipping import tiny_models
from clipping.compare import assert_exact, assert_same_sums, oracle, run
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.rules.linear import LinearSlot, live_positions, without_silence


class Picks(nn.Module):
    """Two layers whose loss looks at some tokens only; the first mixes none of them."""

    def __init__(self, at: slice, layer: type[nn.Module] = nn.Linear, width: int = 5) -> None:
        super().__init__()
        self.before, self.at = nn.Linear(width, width + 1), at
        self.last = nn.Linear(width + 1, 4) if layer is nn.Linear else layer(4, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.before(x)))[:, self.at]
        return out


def losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 12), first=st.integers(0, 11),
    count=st.integers(0, 12), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_span_is_what_is_not_zero_if_that_is_half_or_less(
    batch: int, length: int, first: int, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    g = torch.zeros(batch, length, 3)
    g[-1, first : first + count, 1] = torch.randn(g[-1, first : first + count, 1].shape)
    span = live_positions(g)
    if span is None:
        return
    assert 2 * (span.stop - span.start) <= length
    assert g[:, span].count_nonzero() == g.count_nonzero()
    kept_x, kept_g = without_silence(torch.randn(batch, length, 2), g)
    assert kept_x.shape[1] == kept_g.shape[1] == span.stop - span.start


@pytest.mark.parametrize(("shape", "span"), [((0, 8, 3), None), ((2, 8, 3), slice(0, 1))])
def test_where_nothing_has_a_gradient_one_position_stands_for_all(
    shape: tuple[int, ...], span: slice | None
) -> None:
    assert live_positions(torch.zeros(shape)) == span


def test_a_nan_is_a_gradient() -> None:
    g = torch.zeros(2, 8, 3)
    g[1, 7, 2] = math.nan
    assert live_positions(g) == slice(7, 8)


@pytest.mark.parametrize("at", [slice(0, 1), slice(7, 8), slice(2, 4), slice(0, 8)], ids=str)
@pytest.mark.parametrize("layer", [nn.Linear, Conv1D])
@pytest.mark.parametrize("strategy", ["bookkeeping", "instantiate", "ghost"])
def test_sums_and_norms_are_the_oracles(at: slice, layer: type[nn.Module], strategy: str) -> None:
    torch.manual_seed(0)
    model = Picks(at, layer).double()
    inputs = {"x": torch.randn(3, 8, 5, dtype=torch.float64)}
    engine = assert_exact(model, losses, inputs, clip_norm=0.3, strategy=strategy)
    for seed in range(2):
        engine.reset()
        model.at = at if seed else slice(1, 7)
        torch.manual_seed(seed)
        inputs = {"x": torch.randn(3, 8, 5, dtype=torch.float64)}
        found = run(engine, losses, inputs)
        assert_same_sums(found, oracle(model, losses, inputs, 0.3).clipped_sum, 1e-9)


def test_a_classifiers_last_layers_are_finalized_at_one_token() -> None:
    case = tiny_models.bert_classifier().to(torch.float64)
    engine = assert_exact(case.model, case.losses, case.inputs, clip_norm=0.3)
    lengths = {
        slot.path.split(".", 3)[3]: slot.last_shape[0]
        for slot in engine._recorder.slots
        if isinstance(slot, LinearSlot) and slot.last_shape and "layer.1." in slot.path
    }
    whole = case.inputs["input_ids"].shape[1]
    assert lengths["1.attention.self.key"] == lengths["1.attention.self.value"] == whole
    for path in ("attention.self.query", "attention.output.dense", "intermediate.dense"):
        assert lengths[f"1.{path}"] == 1
    assert lengths["1.output.dense"] == 1


def test_an_infinite_input_at_a_silent_position_still_silences_its_sample() -> None:
    """Zero times infinity is no number: the oracle drops the sample, and so must the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x = torch.randn(2, 8, 4, dtype=torch.float64)
    x[1, 5, 0] = math.inf

    def first(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return model(inputs["x"])[:, 0].square().sum(1)

    engine = ClippingEngine(model, clip_norm=0.3)
    found = run(engine, first, {"x": x})
    wanted = oracle(model, first, {"x": x}, 0.3)
    assert engine.num_nonfinite == 1
    assert_same_sums(found, wanted.clipped_sum, 1e-9)


def test_sums_do_not_depend_on_batches_before() -> None:
    """To the bit: a resumed run has not seen them, and must repeat what it released."""
    torch.manual_seed(0)
    model = Picks(slice(0, 1), width=160)
    batch = {"x": torch.randn(2, 48, 160)}
    found = []
    for before in ((), (slice(0, 1),), (slice(0, 48), slice(0, 1)), (slice(0, 1), slice(0, 48))):
        engine = ClippingEngine(model)
        for at in before:
            model.at = at
            run(engine, losses, {"x": torch.randn(2, 48, 160)})
            engine.reset()
        model.at = slice(0, 1)
        found.append(run(engine, losses, batch))
    for sums in found[1:]:
        assert all(torch.equal(sums[name], found[0][name]) for name in sums)
