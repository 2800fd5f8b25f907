"""Pre-train a vision Transformer on CIFAR-10, without privacy, for a private CIFAR-100.

    python -m shuffled_dpsgd_experiments.pretraining.vision --data data/cifar10 --out pretrained/vit

Images stay on the device. They are flipped, shifted by up to four pixels, get a grey square and
are mixed in pairs; classes are smoothed. Pixels are scaled to [-1, 1], as private training does.
The test images of CIFAR-10 are only scored, once an epoch; the last weights are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shuffled_dpsgd.tasks.data.image_files import read_cifar
from shuffled_dpsgd.tasks.data.loading import drawn_part
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.images import save_processor
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd_experiments.pretraining.common import (
    make_parser,
    pretrain,
    round_as_stored,
    save,
)
from shuffled_dpsgd_experiments.programs import errors_on_one_line

SIDE, SHIFT, SQUARE = 32, 4, 8
SMOOTHING, MIXING = 0.1, 0.2
PUBLIC = "cifar10"


def parser() -> argparse.ArgumentParser:
    found = make_parser(
        "vision",
        __doc__.split("\n", 1)[0],
        hidden=256,
        layers=6,
        heads=4,
        batch_size=512,
        epochs=100,
    )
    add = found.add_argument
    add("--data", required=True, type=Path, help="a folder with CIFAR-10")
    add("--patch", type=int, default=4)
    add("--note", default="", help="what else to say of the data, for pretraining.json")
    return found


def build(options: argparse.Namespace) -> Any:
    """A ViT of the size asked for, with new weights."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(options.seed)
    config = ViTConfig(
        image_size=SIDE,
        patch_size=options.patch,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(PUBLISHED[PUBLIC].classes),
        id2label=dict(enumerate(PUBLISHED[PUBLIC].classes)),
        label2id={name: i for i, name in enumerate(PUBLISHED[PUBLIC].classes)},
    )
    return ViTForImageClassification(config)


def scaled(images: torch.Tensor) -> torch.Tensor:
    """uint8 (N, H, W, 3) to float (N, 3, H, W) in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image flipped or not, shifted, and with a grey square at a place of its own."""
    count, device = len(images), images.device

    def draw(high: int) -> torch.Tensor:
        return torch.randint(high, (count, 1), generator=generator, device=device)

    def box(rows: torch.Tensor, columns: torch.Tensor, low: Any, size: int) -> torch.Tensor:
        top, left = low
        tall = (rows >= top) & (rows < top + size)
        return tall[:, :, None] & ((columns >= left) & (columns < left + size))[:, None]

    places = torch.arange(SIDE, device=device).expand(count, SIDE)
    columns = (places - draw(2) * (SIDE - 1)).abs() + draw(2 * SHIFT + 1) - SHIFT
    rows = places + draw(2 * SHIFT + 1) - SHIFT
    corner = (draw(SIDE) - SQUARE // 2, draw(SIDE) - SQUARE // 2)
    shown = box(rows, columns, (0, 0), SIDE) & ~box(places, places, corner, SQUARE)
    number = torch.arange(count, device=device)[:, None, None]
    moved = images[number, rows.clamp(0, SIDE - 1)[:, :, None], columns.clamp(0, SIDE - 1)[:, None]]
    return scaled(moved) * shown[:, None]


@torch.no_grad()
def evaluate(model: Any, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Mean loss and accuracy."""
    model.eval()
    losses, correct = 0.0, 0
    for part, classes in zip(images.split(1000), labels.split(1000), strict=True):
        logits = _logits(model, scaled(part))
        losses += F.cross_entropy(logits, classes, reduction="sum").item()
        correct += int((logits.argmax(dim=-1) == classes).sum())
    model.train()
    return {"heldout_loss": losses / len(labels), "heldout_accuracy": correct / len(labels)}


def _logits(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=pixels.is_cuda):
        logits: torch.Tensor = model(pixel_values=pixels).logits
    return logits.float()


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train, and write checkpoint and record."""
    options = parser().parse_args(arguments)
    device = chosen_device(options.device)
    arrays = {}
    for split in ("train", "test"):
        images, labels = read_cifar(PUBLIC, options.data, split)
        chosen = drawn_part(len(labels), options.max_records)
        both = torch.as_tensor(images[chosen]), torch.as_tensor(labels[chosen])
        arrays[split] = both[0].to(device), both[1].to(device)
    model = build(options).to(device)
    images, labels = arrays["train"]
    generator = torch.Generator(device).manual_seed(options.seed)
    mixing = torch.distributions.Beta(MIXING, MIXING)
    size = min(options.batch_size, len(labels))
    steps = len(labels) // size

    def losses() -> Iterator[torch.Tensor]:
        order = torch.randperm(len(labels), generator=generator, device=device)
        for chosen in order[: steps * size].split(size):
            pixels, classes = augmented(images[chosen], generator), labels[chosen]
            share = mixing.sample().item()
            logits = _logits(model, share * pixels + (1 - share) * pixels.flip(0))
            parts = ((share, classes), (1 - share, classes.flip(0)))
            yield torch.stack(
                [part * F.cross_entropy(logits, c, label_smoothing=SMOOTHING) for part, c in parts]
            ).sum()

    done = pretrain(
        model,
        losses,
        lambda: evaluate(model, *arrays["test"]),
        options,
        steps_per_epoch=steps,
        keeps_best=False,
    )
    round_as_stored(model, options)
    scores = {name: round(value, 4) for name, value in evaluate(model, *arrays["test"]).items()}
    record = {
        "what": "public pre-training of a vision Transformer; not private",
        "public": PUBLIC,
        "private_later": "cifar100",
        "note": "; ".join(["no image of CIFAR-100 was read", *filter(None, [options.note])]),
        "train_records": len(labels),
        "heldout_records": len(arrays["test"][1]),
        "parameters": sum(p.numel() for p in model.parameters()),
        **scores,
        **done,
    }
    path = save(model, options, record)
    save_processor(options.out, SIDE)
    return path


if __name__ == "__main__":
    with errors_on_one_line():
        main()
