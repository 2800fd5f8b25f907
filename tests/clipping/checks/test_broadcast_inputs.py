"""What a layer computes once for all samples must only be broadcast over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipping.compare import assert_exact, run
from clipping.tiny_models import Inputs
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


class Shared(nn.Module):
    """Adds what `layer` makes of a fixed input of length one, as `use` says."""

    def __init__(self, layer: nn.Module, shared: Tensor, use: Callable[[Tensor, int], Tensor]):
        super().__init__()
        self.layer = layer
        self.own = nn.Linear(4, 4)
        self.shared = nn.Buffer(shared)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + torch.tanh(self.use(self.layer(self.shared), len(x)))


class Gain(nn.Module):
    """A module without a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


LAYERS = {
    "embedding": (lambda: nn.Embedding(9, 4), torch.arange(5)[None]),
    "linear": (lambda: nn.Linear(4, 4), torch.randn(1, 5, 4)),
    "layer-norm": (lambda: nn.LayerNorm(4), torch.randn(1, 5, 4)),
    "convolution": (lambda: nn.Conv1d(5, 5, 1), torch.randn(1, 5, 4)),
    "generic": (Gain, torch.randn(1, 5, 4)),
}


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


def shared(kind: str, use: Callable[[Tensor, int], Tensor]) -> Shared:
    torch.manual_seed(0)
    make, fixed = LAYERS[kind]
    return Shared(make(), fixed, use).double()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_broadcasting_is_exact(kind: str, batch: int) -> None:
    model = shared(kind, lambda y, _: y)
    assert_exact(model, losses, {"x": torch.randn(batch, 5, 4).double()})


def told(error: Exception) -> str:
    """What an error says, or what was added to an error of the model's own."""
    return "".join(getattr(error, "__notes__", [str(error)]))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "use",
    [
        lambda y, _: y[0],
        lambda y, _: y[-1],
        lambda y, _: y.mean(0),
        lambda y, size: y.repeat(size, 1, 1),
    ],
    ids=["first row", "last row", "mean of rows", "repeated"],
)
def test_any_other_use_is_refused(kind: str, use: Callable[[Tensor, int], Tensor]) -> None:
    model = shared(kind, use)
    with pytest.raises((UnsupportedModuleError, RuntimeError)) as refused:
        run(ClippingEngine(model), losses, {"x": torch.randn(3, 5, 4).double()})
    assert told(refused.value).startswith(("layer: expected every", "layer has no batch axis"))


def test_a_lookup_expanded_by_the_model_itself_is_refused() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            where = self.table(torch.arange(5)).unsqueeze(0).expand(len(x), -1, -1)
            return torch.cat([x, where], 1)

    with pytest.raises(RuntimeError) as refused:
        run(ClippingEngine(Positions()), losses, {"x": torch.randn(3, 5, 4)})
    assert "table has no batch axis" in told(refused.value)
    assert "expand its input" in told(refused.value)


class Sharing(nn.Module):
    """A layer for the samples, and one for a table that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.table = nn.Buffer(torch.randn(1, 5, 4))


def test_one_layer_called_twice_in_a_row_on_what_all_share() -> None:
    class Twice(Sharing):
        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) * self.layer(torch.tanh(self.layer(self.table)))

    assert_exact(Twice().double(), losses, {"x": torch.randn(3, 5, 4).double()})


def test_a_random_model_cannot_be_compared_and_is_passed() -> None:
    class Noisy(Sharing):
        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) * self.layer(self.table) + torch.randn_like(x)

    engine = ClippingEngine(Noisy())
    run(engine, losses, {"x": torch.randn(3, 5, 4)})
    assert engine.sample_norms.shape == (3,)


@pytest.mark.parametrize("training", [True, False])
def test_padded_batches_of_pytorch_s_encoder(training: bool) -> None:
    """Without gradients its shortcut packs them into nested tensors, which have no shape."""

    def masked(model: nn.Module, inputs: Inputs) -> Tensor:
        padding = inputs["padding"]
        out = model(inputs["x"], src_key_padding_mask=padding)
        return out.masked_fill(padding[..., None], 0.0).square().flatten(1).sum(1)

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().train(training)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    assert_exact(encoder, masked, {"x": torch.randn(3, 5, 8).double(), "padding": padding})
    assert torch.backends.mha.get_fastpath_enabled()
