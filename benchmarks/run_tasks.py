"""What the whole-run benchmark trains: SST-2, E2E, images of one size, and texts made up.

Texts are encoded once, by the tokenizer of the model that is named, and kept in a file, so that no
side of a comparison is timed while it does so. SST-2 fine-tunes that model. E2E trains a GPT-2 of
the usual small size from random weights, because no weights are at hand everywhere; so do images,
with a small vision Transformer. Texts need no files: random tokens, as many as SST-2 has words and
two more, for a BERT of random weights. Neither weights nor contents change how long a step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shuffled_dpsgd.integrations.per_sample_loss import classification_losses, next_token_losses
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import read_continuations, read_texts
from shuffled_dpsgd.tasks.text import encode_continuations, encode_labelled
from shuffled_dpsgd.tasks.tokens import (
    TokenCollate,
    TokenRecords,
    class_labels,
    continuation_labels,
    ids_of,
    load_tokenizer,
)
from shuffled_dpsgd.training.data import MapStyle

# Workloads, with the samples a GPU takes at once; the logits of a language model are large.
PHYSICAL = {"sst2": 1000, "e2e": 250, "images": 1000, "texts": 1000}
# Those that no file is needed for.
MADE_UP = frozenset({"images", "texts"})
# Words of SST-2's training sentences, in twentieths of all of them.
WORDS = (1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 18, 21, 26, 52)
NUM_TEXTS = 67_349
MAX_LENGTH = 128
NUM_IMAGES = 50_000
NUM_CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """Data, how it is put together, a model and its losses."""

    data: MapStyle
    collate: Callable[[list[Any]], Any] | None
    model: nn.Module
    losses: Callable[[nn.Module, Any], Tensor]


def encode(workload: str, data: Path, model: Path, file: Path, records: int | None) -> None:
    """Write the token ids of a text workload to `file`."""
    tokenizer = load_tokenizer(str(model))
    if workload == "sst2":
        section = DataConfig(format="sst2", path=str(data / workload))
        texts = read_texts(section, num_labels=2).train[:records]
        encoded = encode_labelled(texts, tokenizer, MAX_LENGTH)
    else:
        section = DataConfig(format="e2e", path=str(data / workload))
        pairs = read_continuations(section).train[:records]
        encoded = encode_continuations(pairs, tokenizer, MAX_LENGTH)
    ids = np.concatenate([np.asarray(ids_of(record), dtype=np.int32) for record in encoded])
    lengths = np.asarray([len(ids_of(record)) for record in encoded])
    belonging = np.asarray([other for _, other in encoded])
    np.savez(file, ids=ids, lengths=lengths, belonging=belonging, pad_id=tokenizer.pad_id)


def build(workload: str, encoded: Path | None, model: Path | None, records: int | None) -> RunTask:
    """The task of one process; `encoded` is what `encode` wrote."""
    torch.manual_seed(0)
    if workload == "images":
        return _images(records or NUM_IMAGES)
    if workload == "texts":
        return _texts(records or NUM_TEXTS)
    assert encoded is not None
    assert model is not None
    with np.load(encoded) as arrays:
        rows = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
        others = arrays["belonging"].tolist()
        pad_id, largest = int(arrays["pad_id"]), int(arrays["ids"].max())
    data = TokenRecords([(row.tolist(), other) for row, other in zip(rows, others, strict=True)])
    if workload == "sst2":
        return RunTask(
            data=data,
            collate=TokenCollate(pad_id=pad_id, labels=class_labels),
            model=_classifier(model),
            losses=_class_losses,
        )
    return RunTask(
        data=data,
        collate=TokenCollate(pad_id=pad_id, labels=continuation_labels),
        model=_language_model(largest + 1),
        losses=_continuation_losses,
    )


def _classifier(folder: Path) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    return model


def _language_model(vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=-(-vocabulary // 64) * 64, use_cache=False))


def _images(count: int) -> RunTask:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=384, num_hidden_layers=6, num_attention_heads=6,
        intermediate_size=1536, num_labels=NUM_CLASSES,
    )  # fmt: skip
    images, labels = torch.randn(count, 3, 32, 32), torch.randint(NUM_CLASSES, (count,))

    def gather(records: list[int]) -> tuple[Tensor, Tensor]:
        # At once: a loop over the records would keep the interpreter from the other thread.
        chosen = torch.tensor(records)
        return images[chosen], labels[chosen]

    model = ViTForImageClassification(config)
    return RunTask(data=range(count), collate=gather, model=model, losses=_image_losses)


def _texts(count: int) -> RunTask:
    from transformers import BertConfig, BertForSequenceClassification

    numbers = np.random.default_rng(0)
    words = np.interp(numbers.random(count), np.linspace(0, 1, len(WORDS)), WORDS)
    data = TokenRecords(
        [
            (numbers.integers(1, 30_000, 2 + round(length)).tolist(), place % 2)
            for place, length in enumerate(words)
        ]
    )
    return RunTask(
        data=data,
        collate=TokenCollate(pad_id=0, labels=class_labels),
        model=BertForSequenceClassification(BertConfig(num_labels=2)),
        losses=_class_losses,
    )


def _class_losses(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return classification_losses(model(**inputs).logits, labels)


def _continuation_losses(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return next_token_losses(model(**inputs).logits, labels)


def _image_losses(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return classification_losses(model(images).logits, labels)
