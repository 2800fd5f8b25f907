"""Small models with data for them, and the loops the tests of training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.training import PrivateTraining, RandomStreams

RECORDS = 40
CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model maker, a data set for the model, and its per-sample loss."""

    make: Callable[[], nn.Module]
    data: Any
    loss: Callable[[nn.Module, Any], torch.Tensor]


class FixedSampler:
    """Hands out the batches it was given, step by step."""

    def __init__(self, *batches: list[int], dataset_size: int = RECORDS) -> None:
        self.dataset_size = dataset_size
        self._batches = batches

    def indices(self, step: int) -> torch.Tensor:
        return torch.tensor(self._batches[step % len(self._batches)], dtype=torch.int64)


def make_mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, CLASSES)).to(dtype)


def vectors(dtype: torch.dtype = torch.float32, count: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


def mlp_case(dtype: torch.dtype = torch.float32) -> Case:
    return Case(make=lambda: make_mlp(dtype), data=vectors(dtype), loss=classify)


def make_bert(
    hidden: int = 16, vocabulary: int = 30, positions: int = 12, **changes: Any
) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=positions,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )
    return BertForSequenceClassification(config)


class Sentences:
    """A data set of dictionaries, as tokenised Hugging Face data sets are."""

    def __init__(self, count: int = RECORDS) -> None:
        generator = torch.Generator().manual_seed(2)
        self._ids = torch.randint(3, 30, (count, 8), generator=generator)
        self._labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self._ids[index],
            "attention_mask": torch.ones(8, dtype=torch.int64),
            "labels": self._labels[index],
        }


def classify_sentences(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def bert_case(dtype: torch.dtype = torch.float32) -> Case:
    return Case(make=lambda: make_bert().to(dtype), data=Sentences(), loss=classify_sentences)


def gpt2_case(dtype: torch.dtype = torch.float32) -> Case:
    """A language model whose head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=30,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config).to(dtype)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        words = batch["input_ids"]
        logits = model(input_ids=words).logits[:, :-1]
        per_word = F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none")
        return per_word.mean(dim=1)

    return Case(make=make, data=Sentences(), loss=loss)


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def classify_images(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(pixel_values=batch.x).logits, batch.y, reduction="none")


def vit_case(dtype: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(RECORDS, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (RECORDS,), generator=generator)
    data = TensorDataset(images, labels)
    return Case(make=lambda: make_vit().to(dtype), data=data, loss=classify_images)


def run(private: PrivateTraining, case: Case, *, num_steps: int | None = None) -> list[float]:
    """Train to the end of the plan; the mean loss of every step, empty batches left out."""
    losses: list[float] = []
    for batch in private.batches(case.data, num_steps=num_steps):
        private.backward(case.loss(private.model, batch))
        if private.step():
            assert private.last_metrics is not None
            losses.append(private.last_metrics.loss or 0.0)
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


SEEDED = RandomStreams(seed=5)
