"""Models that move samples between rows, or let them meet, are found out on the first batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipping.compare import assert_exact, run
from clipping.tiny_models import Inputs
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError

REFUSED = "whatever the others are"
Inner = Callable[[nn.Module, Tensor], Tensor]


class Around(nn.Module):
    """Two layers, the second called in some way of its own."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.second = nn.Linear(10, 3)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.second, self.norm(torch.tanh(self.first(x))))


def in_order(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h)


def sorted_by_content(layer: nn.Module, h: Tensor) -> Tensor:
    order = h[:, 0].argsort()
    return layer(h[order])[order.argsort()]


def flipped(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.flip(0)).flip(0)


def rolled(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.roll(1, 0)).roll(-1, 0)


def centred(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h - h.mean(0))


def centred_outputs(layer: nn.Module, h: Tensor) -> Tensor:
    outputs = layer(h)
    return outputs - outputs.mean(0)


def centred_in_training(layer: nn.Module, h: Tensor) -> Tensor:
    return centred(layer, h) if layer.training else layer(h)


def scaled(layer: nn.Module, h: Tensor) -> Tensor:
    """As activations are that are quantised by the largest of a batch."""
    return layer(h / h.abs().max())


def noisy(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h + torch.randn_like(h))


def mixed_up_in_training(layer: nn.Module, h: Tensor) -> Tensor:
    partners = torch.randperm(len(h)) if layer.training else torch.arange(len(h))
    return layer(0.7 * h + 0.3 * h[partners])


def with_noise_of_the_batch(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h + h.abs().mean() * torch.randn_like(h)) if layer.training else layer(h)


def seldom_skipped(layer: nn.Module, h: Tensor) -> Tensor:
    """As whole layers are dropped in training, for all samples at once."""
    skipped = layer.training and torch.rand([]) < 0.3
    return layer(h if skipped else torch.tanh(h))


MIXING = (
    sorted_by_content,
    flipped,
    rolled,
    centred,
    centred_outputs,
    centred_in_training,
    scaled,
    mixed_up_in_training,
    with_noise_of_the_batch,
)


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().sum(1)


def batch(size: int, dtype: torch.dtype = torch.float32) -> Inputs:
    torch.manual_seed(size)
    return {"x": torch.randn(size, 6, dtype=dtype)}


@pytest.mark.parametrize("inner", MIXING)
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("seed", range(2))
def test_samples_that_move_or_meet_are_refused(inner: Inner, size: int, seed: int) -> None:
    """Unnoticed, the norms of one sample would be made of several samples' gradients."""
    torch.manual_seed(seed)
    # Two samples may lie in the order that a model brings them into.
    often = {"check_rate": 1.0} if inner is sorted_by_content and size == 2 else {}
    engine = ClippingEngine(Around(inner), **often)

    def first_batches() -> None:
        for step in range(8):
            torch.manual_seed(8 * seed + step)
            run(engine, losses, {"x": torch.randn(size, 6)})

    with pytest.raises(UnsupportedModuleError, match=REFUSED):
        first_batches()


def test_a_first_batch_of_one_does_not_hide_it() -> None:
    engine = ClippingEngine(Around(flipped))
    run(engine, losses, batch(1))
    with pytest.raises(UnsupportedModuleError, match=REFUSED):
        run(engine, losses, batch(4))


def test_samples_that_keep_apart_pass() -> None:
    assert_exact(Around(in_order).double(), losses, batch(4, torch.float64))


def test_a_model_that_draws_random_numbers_is_not_blamed() -> None:
    run(ClippingEngine(Around(noisy)), losses, batch(4))


@pytest.mark.slow
def test_layers_dropped_at_random_are_not_blamed() -> None:
    for seed in range(30):
        torch.manual_seed(seed)
        run(ClippingEngine(Around(seldom_skipped)), losses, batch(4))


@pytest.mark.slow
def test_noise_as_large_as_the_tolerance_is_not_blamed() -> None:
    """Then some pairs of runs agree and others do not; one that does must not settle it."""

    def slightly_noisy(layer: nn.Module, h: Tensor) -> Tensor:
        return layer(h + 5e-4 * torch.randn_like(h) if layer.training else h)

    for seed in range(30):
        torch.manual_seed(seed)
        run(ClippingEngine(Around(slightly_noisy)), losses, batch(4))


def test_a_model_that_cuts_common_padding_off_is_not_blamed() -> None:
    class Cutting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            longest = int((x != 0).any(2).sum(1).max())
            return self.layer(x[:, :longest]) * (x[:, :longest] != 0)

    x = torch.randn(4, 5, 3).double()
    x[0, 2:] = x[1, 3:] = 0.0
    for order in (slice(None), torch.tensor([2, 3, 0, 1])):
        assert_exact(
            Cutting().double(), lambda m, i: m(i["x"]).square().flatten(1).sum(1), {"x": x[order]}
        )


def test_a_model_that_takes_no_single_sample_is_not_blamed() -> None:
    def several(layer: nn.Module, h: Tensor) -> Tensor:
        if len(h) == 1:
            raise ValueError("at least two")
        return layer(h)

    engine = ClippingEngine(Around(several))
    run(engine, losses, batch(2))
    assert engine.sample_norms.shape == (2,)


def test_broken_samples_are_not_blamed() -> None:
    inputs = batch(4)
    inputs["x"][1] = float("nan")
    inputs["x"][2] = float("inf")
    engine = ClippingEngine(Around(in_order))
    run(engine, losses, inputs)
    assert engine.num_nonfinite == 2


@pytest.mark.parametrize("inner", [in_order, flipped])
def test_half_precision_is_given_its_rounding(inner: Inner) -> None:
    engine = ClippingEngine(Around(inner))
    with torch.autocast("cpu", torch.bfloat16):
        if inner is in_order:
            run(engine, losses, batch(64))
            return
        with pytest.raises(UnsupportedModuleError, match=REFUSED):
            run(engine, losses, batch(64))


def test_dropout_hides_nothing() -> None:
    def dropped(layer: nn.Module, h: Tensor) -> Tensor:
        return centred_in_training(layer, dropout(h))

    dropout = nn.Dropout(0.5)
    model = Around(dropped)
    model.add_module("dropout", dropout)
    with pytest.raises(UnsupportedModuleError, match=REFUSED):
        run(ClippingEngine(model), losses, batch(4))
    assert dropout.training
