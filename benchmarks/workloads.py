"""What is trained, by name: stock Hugging Face models and two written by hand.

A name reads `model-BATCHxLENGTH`, such as `gpt2-32x128`; ViT's length follows from its images.
Weights and data are random because only speed and memory are measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
NUM_CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model, one batch shape, one loss."""

    name: str
    family: str
    batch_size: int
    length: int
    build: Callable[[], nn.Module]

    def batch(self, device: torch.device) -> Batch:
        """One batch of random data, always the same."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.length)
        if self.family == "mlp":
            inputs = {"x": torch.randn(shape, generator=generator)}
            labels = torch.randint(NUM_CLASSES, shape[:1], generator=generator)
        elif self.family == "vit":
            side = 16 * round((self.length - 1) ** 0.5)
            pixels = torch.randn(self.batch_size, 3, side, side, generator=generator)
            inputs = {"pixel_values": pixels}
            labels = torch.randint(NUM_CLASSES, shape[:1], generator=generator)
        else:
            inputs = {"input_ids": torch.randint(1000, shape, generator=generator)}
            classes = shape if self.family == "gpt2" else shape[:1]
            labels = torch.randint(2, classes, generator=generator)
        return {name: tensor.to(device) for name, tensor in {**inputs, "labels": labels}.items()}

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """(B,) losses; a language model's is the mean over its tokens."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits, labels = model(**inputs).logits, batch["labels"]
        per_label = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return per_label.view(len(labels), -1).mean(1)


def gpt2(length: int, **sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    positions = max(1024, length)
    return GPT2LMHeadModel(GPT2Config(n_positions=positions, use_cache=False, **sizes))


def bert(length: int, **sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    positions = max(512, length)
    return BertForSequenceClassification(BertConfig(max_position_embeddings=positions, **sizes))


def vit(length: int, **sizes: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    side = 16 * round((length - 1) ** 0.5)
    return ViTForImageClassification(ViTConfig(image_size=side, num_labels=NUM_CLASSES, **sizes))


def own_vit(length: int, **sizes: int) -> nn.Module:
    from benchmarks.handwritten import VisionTransformer

    return VisionTransformer(16 * round((length - 1) ** 0.5), NUM_CLASSES, **sizes)


def own_gpt(length: int, **sizes: int) -> nn.Module:
    from benchmarks.handwritten import LanguageModel

    return LanguageModel(max(1024, length), **sizes)


def perceptron(length: int) -> nn.Module:
    from benchmarks.handwritten import Perceptron

    return Perceptron(length, NUM_CLASSES)


SMALL_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192}
SMALL_BERT = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 1024, "vocab_size": 8192,
}  # fmt: skip
MODELS: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "gpt2": ("gpt2", gpt2),
    "gpt2-large": ("gpt2", lambda length: gpt2(length, n_embd=1280, n_layer=36, n_head=20)),
    "bert-base": ("bert", bert),
    "vit-base": ("vit", vit),
    "gpt2-small": ("gpt2", lambda length: gpt2(length, **SMALL_GPT2)),
    "bert-small": ("bert", lambda length: bert(length, **SMALL_BERT)),
    "own-vit": ("vit", own_vit),
    "own-gpt": ("gpt2", own_gpt),
    "own-gpt-small": (
        "gpt2",
        lambda length: own_gpt(length, width=256, depth=4, heads=4, vocabulary=8192),
    ),
    "own-gpt-deep": (
        "gpt2",
        lambda length: own_gpt(length, width=64, depth=24, heads=2, vocabulary=1024),
    ),
    "mlp": ("mlp", perceptron),
    "own-vit-small": ("vit", lambda length: own_vit(length, width=192, depth=3, heads=3)),
}
HEADLINE = (
    "gpt2-32x128", "vit-base-128x197", "bert-base-64x128", "gpt2-large-32x128", "gpt2-8x1024",
)  # fmt: skip
SCALING = (
    "gpt2-8x128", "gpt2-32x128", "gpt2-128x128", "gpt2-16x256", "gpt2-8x512", "gpt2-4x1024",
    "gpt2-16x1024", "gpt2-2x2048", "gpt2-1x4096", "gpt2-4x4096",
)  # fmt: skip
CPU = (
    "gpt2-2x64", "gpt2-4x64", "gpt2-8x64", "bert-base-2x64", "bert-base-8x128", "vit-base-1x197",
    "gpt2-small-8x64", "bert-small-8x64", "bert-small-2x512",
)  # fmt: skip
# Models that nobody tuned for.
OWN = ("own-vit-128x197", "own-gpt-32x128")
# Batches of one, small and deep models, and steps that take as long as Python takes.
SMALL = ("bert-small-1x64", "own-vit-small-1x197", "own-gpt-deep-8x16", "mlp-64x16")
SUITES = {"headline": HEADLINE, "scaling": SCALING, "cpu": CPU, "own": OWN, "small": SMALL}
# What a suite compares unless told otherwise; `opacus:hooks` beside all the others would not fit
# into a GPU's memory.
DEFAULT_ADAPTERS = {
    "headline": ("plain", "plain:compiled", "ours", "ours:compiled", "opacus:ghost"),
    "scaling": ("plain", "ours"),
    "cpu": ("plain", "ours", "opacus:ghost"),
    "own": ("plain", "plain:compiled", "ours", "ours:compiled"),
    "small": ("plain", "ours", "training", "opacus:hooks"),
}


def workload(name: str) -> Workload:
    """The workload of a name such as `gpt2-32x128`."""
    match = re.fullmatch(r"(.+)-(\d+)x(\d+)", name)
    if match is None or match[1] not in MODELS:
        raise SystemExit(f"workload {name!r}: expected MODEL-BATCHxLENGTH, MODEL of {list(MODELS)}")
    family, build = MODELS[match[1]]
    length = int(match[3])
    return Workload(
        name=name,
        family=family,
        batch_size=int(match[2]),
        length=length,
        build=lambda: build(length),
    )
