"""A zoo of healthy models, none of which a check may stop.

Tiny models of every kind that users train, in float32 and under bfloat16 autocast, with several
ways of loading, transforming, collating and loss. A share of the batches is checked that is far
above the default.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

from shuffled_dpsgd.training import PrivateTraining, make_private

RECORDS, EXPECTED, PHYSICAL, CLASSES, WORDS = 200, 16, 12, 3, 40
RATE = 1 / 16
Make = Callable[[], nn.Module]


# --- data ----------------------------------------------------------------------------------------


class Sentences(Dataset[Any]):
    """Texts of different lengths, with a class."""

    def __init__(self, ragged: bool = True) -> None:
        draws = random.Random(0)
        self.texts = [
            [draws.randrange(1, WORDS) for _ in range(draws.randrange(3, 12) if ragged else 8)]
            for _ in range(RECORDS)
        ]
        self.labels = [draws.randrange(CLASSES) for _ in range(RECORDS)]

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": self.texts[index], "label": self.labels[index]}


class Images(Dataset[Any]):
    """Pictures; with `augments`, shifted and flipped at every load."""

    def __init__(self, augments: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(RECORDS, 1, 8, 8, generator=generator)
        self.y = torch.randint(CLASSES, (RECORDS,), generator=generator)
        self.augments = augments

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.augments:
            x = x.roll(int(torch.randint(-2, 3, ())), -1)
            x = x.flip(-1) if random.random() < 0.5 else x + 0.1 * torch.randn(x.shape)
        return x, self.y[index]


class Rows(Dataset[Any]):
    """Numbers, loaded many at a time by a transform that looks at each row alone."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(RECORDS, 6, generator=generator)
        self.y = torch.randint(CLASSES, (RECORDS,), generator=generator)

    def __len__(self) -> int:
        return RECORDS

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        x = F.normalize(self.x[indices], dim=1) + 0.05 * torch.randn(len(indices), 6)
        return list(zip(x, self.y[indices], strict=True))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]


def padded(samples: list[dict[str, Any]], side: str = "right", masks: bool = False) -> Any:
    """Texts padded to the longest of their batch, perhaps with words masked at random."""
    longest = max(len(sample["ids"]) for sample in samples)
    rows = [
        sample["ids"] + [0] * (longest - len(sample["ids"]))
        if side == "right"
        else [0] * (longest - len(sample["ids"])) + sample["ids"]
        for sample in samples
    ]
    ids = torch.tensor(rows)
    if masks:
        ids = ids.masked_fill(torch.bernoulli(torch.full(ids.shape, 0.15)).bool() & (ids > 0), 1)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def noisy(samples: list[Any]) -> Any:
    """Every row gets noise of its own, some of them more draws than others."""
    rows = []
    for x, _ in samples:
        while random.random() < 0.3:
            torch.rand(())
        rows.append(x + 0.1 * torch.randn(x.shape))
    return torch.stack(rows), torch.stack([y for _, y in samples])


# --- losses --------------------------------------------------------------------------------------


def of_classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x).float(), batch.y, reduction="none")


def smooth(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch.x).float()
    return F.cross_entropy(logits, batch.y, reduction="none", label_smoothing=0.1)


def weighted(model: nn.Module, batch: Any) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0])
    return F.cross_entropy(model(batch.x).float(), batch.y, weight=weight, reduction="none")


def of_texts(model: nn.Module, batch: Any) -> Tensor:
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")


def of_words(model: nn.Module, batch: Any) -> Tensor:
    """The next word, averaged over each text's own words."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits.float()[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1).clamp(min=1)


def of_pairs(model: nn.Module, batch: Any) -> Tensor:
    """An encoder and a decoder that says the text again."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    outputs = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    losses = F.cross_entropy(outputs.logits.float().transpose(1, 2), ids, reduction="none")
    return (losses * mask).sum(1) / mask.sum(1)


def of_sequences(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).float(), batch["labels"], reduction="none")


# --- models --------------------------------------------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2,
                                      n_head=2, bos_token_id=0, eos_token_id=0))  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=32, max_position_embeddings=16,
            attention_dropout=0.1, use_cache=False,
        )
    )  # fmt: skip


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_ffn_dim=32, max_position_embeddings=16, use_cache=False,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                 use_cache=False, decoder_start_token_id=0)
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    return model


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = ViTForImageClassification(
                ViTConfig(
                    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_channels=1,
                    intermediate_size=32, image_size=8, patch_size=4, num_labels=CLASSES,
                    hidden_dropout_prob=0.1,
                )
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.body(pixel_values=x).logits
            return logits

    return Logits()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, CLASSES),
    )  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent classifier of texts, read at their last word."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = kind(8, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.words(ids))[0]
        last = (ids > 0).sum(1).clamp(min=1) - 1
        logits: Tensor = self.head(hidden[torch.arange(len(ids)), last])
        return logits


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1,
                                             fan_in_fan_out=True))  # fmt: skip


def right(samples: list[Any]) -> Any:
    return padded(samples)


def left(samples: list[Any]) -> Any:
    return padded(samples, side="left")


def masked(samples: list[Any]) -> Any:
    return padded(samples, masks=True)


TEXTS, EVEN = Sentences(), Sentences(ragged=False)
BACKWARDS = Subset(TEXTS, list(range(RECORDS - 1, -1, -1)))
# Model, data, collate function and loss; `shuffle` is off where the model has no symmetry.
ZOO: dict[str, tuple[Make, Any, Any, Any, str]] = {
    "MLP": (mlp, Rows(), default_collate, of_classes, "every-step"),
    "MLP, class weights": (mlp, Rows(), noisy, weighted, "off"),
    "CNN": (cnn, Images(augments=True), default_collate, of_classes, "off"),
    "CNN, noisy collate": (cnn, Images(augments=False), noisy, smooth, "off"),
    "ViT": (vit, Images(augments=True), default_collate, of_classes, "every-step"),
    "BERT": (bert, TEXTS, right, of_texts, "every-step"),
    "BERT, masked words": (bert, BACKWARDS, masked, of_texts, "off"),
    "GPT-2": (gpt2, TEXTS, right, of_words, "every-step"),
    "GPT-2, LoRA": (lora, EVEN, right, of_words, "off"),
    "Llama": (llama, BACKWARDS, right, of_words, "at-release"),
    "BART": (bart, TEXTS, right, of_pairs, "off"),
    "T5": (t5, EVEN, right, of_pairs, "off"),
    "GRU": (lambda: Recurrent(nn.GRU), TEXTS, right, of_sequences, "off"),
    "LSTM": (lambda: Recurrent(nn.LSTM), EVEN, left, of_sequences, "off"),
}
PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def train(name: str, precision: str, steps: int) -> PrivateTraining:
    """One private run."""
    make, data, collate, loss, shuffle = ZOO[name]
    model, cast = make(), PRECISIONS[precision]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def cast_loss(model: nn.Module, batch: Any) -> Tensor:
        with cast():
            losses: Tensor = loss(model, batch)
            return losses

    private = make_private(
        model, optimizer, dataset_size=RECORDS, expected_batch_size=EXPECTED, num_steps=steps,
        delta=1e-3, noise_multiplier=1.0, clip_norm=0.5, shuffle=shuffle,  # type: ignore[arg-type]
        physical_batch_size=PHYSICAL, check_rate=RATE, loss=cast_loss,
    )  # fmt: skip
    for batch in private.batches(data, collate=collate):
        private.backward(cast_loss(model, batch))
        private.step()
    private.close()
    return private
