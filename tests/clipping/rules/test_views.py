"""A sample that is several rows of the batch: its norm and its sum run over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipping.compare import assert_exact
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


class Views(nn.Module):
    """Images (B, K, ...) through a model of single ones: logits (B, K, classes)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found: Any = self.model(images.flatten(0, 1))
        logits: Tensor = found if isinstance(found, Tensor) else found.logits
        return logits.unflatten(0, images.shape[:2])


def losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The mean over the views of a sample."""
    logits = model(inputs["images"])
    labels = inputs["labels"][:, None].expand(logits.shape[:2])
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


def batch(*shape: int, views: int, size: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(views)
    images = torch.randn(size, views, *shape, dtype=torch.float64)
    return {"images": images, "labels": torch.arange(size) % 3}


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=3,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model.double()


@pytest.mark.parametrize("views", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_views_of_a_vision_transformer_are_one_sample(views: int, strategy: str) -> None:
    inputs = batch(1, 8, 8, views=views)
    engine = assert_exact(Views(vit()), losses, inputs, clip_norm=0.3, strategy=strategy)
    assert (engine.sample_norms > 0.3).any()
    assert len(engine.sample_norms) == 5


def test_a_second_batch_of_another_size_is_as_exact() -> None:
    model = Views(vit())
    engine = assert_exact(model, losses, batch(1, 8, 8, views=2), clip_norm=0.3)
    for size in (1, 2, 7):
        engine.reset()
        inputs = batch(1, 8, 8, views=2, size=size)
        with engine:
            engine.backward(losses(model, inputs))
        found = {name: value.clone() for name, value in engine.clipped_sum().items()}
        fresh = assert_exact(model, losses, inputs, clip_norm=0.3)
        torch.testing.assert_close(found, fresh.clipped_sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("views", [1, 4])
def test_views_on_a_gpu_are_those_of_the_oracle(views: int) -> None:
    model = Views(vit()).float()
    inputs = batch(1, 8, 8, views=views, size=33)
    inputs["images"] = inputs["images"].float()
    moved = {key: value.cuda() for key, value in inputs.items()}
    assert_exact(model.cuda(), losses, moved, rtol=1e-3, clip_norm=0.3)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
        (nn.Conv2d(4, 3, 2, stride=2), (4, 5, 5)),
        (nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), (4, 5, 5)),
        (nn.Conv1d(4, 3, 3, padding="same"), (4, 6)),
    ],
)
@pytest.mark.parametrize("strategy", ["bookkeeping", "instantiate"])
def test_views_of_convolutions(layer: nn.Module, shape: tuple[int, ...], strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    inputs = batch(*shape, views=3)
    model(inputs["images"][:, 0])
    assert_exact(Views(model), losses, inputs, clip_norm=0.3, strategy=strategy)


class Token(nn.Module):
    """Broadcasts a parameter as ViT does, in a class that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 6, dtype=torch.float64))
        self.head = nn.Linear(6, 3).double()

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(images + self.position)
        return found


def test_a_class_that_is_not_known_to_broadcast_is_refused_by_name() -> None:
    inputs = batch(6, views=2)
    engine = ClippingEngine(Views(Token()))
    with pytest.raises(UnsupportedModuleError, match="model"), engine:
        engine.backward(losses(engine.model, inputs))


class Interleaved(Views):
    """The views of a sample are not side by side: row i belongs to sample i modulo B."""

    def forward(self, images: Tensor) -> Tensor:
        found: Any = self.model(images.transpose(0, 1).flatten(0, 1))
        logits: Tensor = found.logits
        return logits.unflatten(0, (images.shape[1], images.shape[0])).transpose(0, 1)


def test_rows_of_a_sample_that_are_not_side_by_side_are_refused() -> None:
    engine = ClippingEngine(Interleaved(vit()))
    with pytest.raises(UnsupportedModuleError, match="model"), engine:
        engine.backward(losses(engine.model, batch(1, 8, 8, views=2)))
