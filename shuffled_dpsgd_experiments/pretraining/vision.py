"""Pre-train a vision Transformer on CIFAR-10, without privacy, for a private CIFAR-100.

    python -m shuffled_dpsgd_experiments.pretraining.vision --data data/cifar10 --out pretrained/vit

Images stay on the device. They are flipped, shifted by up to four pixels, get a grey square and
are mixed in pairs; classes are smoothed. Pixels are scaled to [-1, 1], as private training does.
The test images of CIFAR-10 are only scored, once an epoch; the last weights are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.tasks.data.image_files import read_cifar
from shuffled_dpsgd.tasks.data.loading import drawn_part
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.images import save_processor
from shuffled_dpsgd.tasks.models import no_progress_bars
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd_experiments.pretraining.options import make_parser
from shuffled_dpsgd_experiments.pretraining.schedule import (
    Pace,
    decayed,
    descend,
    refuse_divergence,
    rounded,
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
def evaluate(model: Any, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    losses, correct = 0.0, 0
    for part, classes in zip(images.split(1000), labels.split(1000), strict=True):
        logits = _logits(model, scaled(part))
        losses += F.cross_entropy(logits, classes, reduction="sum").item()
        correct += int((logits.argmax(dim=-1) == classes).sum())
    model.train()
    return losses / len(labels), correct / len(labels)


def _logits(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=pixels.is_cuda):
        logits: torch.Tensor = model(pixel_values=pixels).logits
    return logits.float()


def train(
    model: Any, arrays: dict[str, tuple[torch.Tensor, torch.Tensor]], options: argparse.Namespace
) -> dict[str, Any]:
    """Train to the end of the epochs or of the time."""
    images, labels = arrays["train"]
    generator = torch.Generator(images.device).manual_seed(options.seed)
    mixing = torch.distributions.Beta(MIXING, MIXING)
    optimizer = decayed(model, options.weight_decay)
    size = min(options.batch_size, len(labels))
    pace = Pace(num_steps=options.epochs * (len(labels) // size), seconds=options.seconds)
    curve: list[dict[str, float]] = []
    model.train()
    while not pace.done:
        order = torch.randperm(len(labels), generator=generator, device=images.device)
        for chosen in order[: len(order) // size * size].split(size):
            pixels, classes = augmented(images[chosen], generator), labels[chosen]
            share = mixing.sample().item()
            logits = _logits(model, share * pixels + (1 - share) * pixels.flip(0))
            loss = share * F.cross_entropy(logits, classes, label_smoothing=SMOOTHING)
            loss = loss + (1 - share) * F.cross_entropy(
                logits, classes.flip(0), label_smoothing=SMOOTHING
            )
            descend(model, optimizer, loss, pace, options.learning_rate)
            if pace.done:
                break
        refuse_divergence(loss, pace)
        heldout_loss, accuracy = evaluate(model, *arrays["test"])
        curve.append(
            {
                "step": pace.step,
                "seconds": round(pace.elapsed, 1),
                "train_loss": round(loss.item(), 4),
                "heldout_loss": round(heldout_loss, 4),
                "heldout_accuracy": round(accuracy, 4),
            }
        )
        print(curve[-1], flush=True)
    return {"steps": pace.step, "seconds": round(pace.elapsed, 1), "curve": curve}


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
    found = train(model, arrays, options)
    rounded(model, options.stored)
    heldout_loss, accuracy = evaluate(model, *arrays["test"])
    record = {
        "what": "public pre-training of a vision Transformer; not private",
        "public": PUBLIC,
        "private_later": "cifar100",
        "note": "; ".join(["no image of CIFAR-100 was read", *filter(None, [options.note])]),
        "train_records": len(arrays["train"][1]),
        "heldout_records": len(arrays["test"][1]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "heldout_loss": round(heldout_loss, 4),
        "heldout_accuracy": round(accuracy, 4),
        **found,
        "settings": {k: v for k, v in vars(options).items() if k not in ("data", "out", "note")},
        "environment": environment(str(device)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        (model.bfloat16() if options.stored == "bf16" else model).save_pretrained(options.out)
    save_processor(options.out, SIDE)
    path: Path = options.out / "pretraining.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path, flush=True)
    return path


if __name__ == "__main__":
    with errors_on_one_line():
        main()
