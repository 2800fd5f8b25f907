"""Clip per-sample gradients of a small Transformer, and check the result one example at a time.

    python examples/clip_per_sample.py

No data, no download: a two-layer encoder with a class token, a batch of random images, one
optimizer step from the clipped sum. Noise is left out on purpose; see `make_private` for training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine, clipped_sum_reference


class SmallTransformer(nn.Module):
    """Patches, a class token, position embeddings, two encoder layers, a linear head."""

    def __init__(self, width: int = 32, patches: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens + self.positions)[:, 0])


def main() -> None:
    torch.manual_seed(0)
    model = SmallTransformer()
    images, labels = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    engine = ClippingEngine(model, clip_norm=1.0)
    with engine:
        for start in (0, 4):  # two micro-batches; their clipped gradients add up
            losses = F.cross_entropy(
                model(images[start : start + 4]), labels[start : start + 4], reduction="none"
            )
            losses.sum().backward()

    print(engine.plan())
    print("norms before clipping:", [f"{norm:.3f}" for norm in engine.sample_norms.tolist()])

    def loss_of_one(model: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
        image, label = example
        return F.cross_entropy(model(image[None]), label[None])

    reference = clipped_sum_reference(
        model, loss_of_one, list(zip(images, labels, strict=True)), clip_norm=1.0
    )
    clipped = engine.clipped_sum()
    worst = max(
        float((clipped[name] - wanted).abs().max() / wanted.abs().max())
        for name, wanted in reference.clipped_sum.items()
    )
    print(f"largest relative difference to one example at a time: {worst:.1e}")

    for name, parameter in model.named_parameters():
        parameter.grad = clipped[name] / len(images)
    optimizer.step()
    engine.reset()


if __name__ == "__main__":
    main()
