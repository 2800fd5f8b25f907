"""Whole runs against DP-SGD written out by hand: one record at a time, plain autograd.

Only the random numbers are shared, drawn from their documented streams. Sentences of different
lengths, padding, logical batches in several parts, empty ones, tied and frozen weights, shuffles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shuffled_dpsgd.core.noise import Place, normal
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.permutation import apply, draw
from shuffled_dpsgd.training import PrivateTraining, RandomStreams, make_private
from training.cases import gpt2_case, make_bert

RECORDS, EXPECTED, STEPS, CLIP, SEED = 40, 2, 6, 0.3, 5


class Ragged:
    """Sentences of two to eight words, with a class each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        lengths = torch.randint(2, 9, (RECORDS,), generator=generator).tolist()
        self._words = [torch.randint(1, 30, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._words[index]


def padded(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def next_words(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(**batch).logits[:, :-1]
    mask = batch["attention_mask"][:, 1:].to(logits.dtype)
    wrong = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return (wrong * mask).sum(1) / mask.sum(1)


def first_word(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(**batch).logits, batch["input_ids"][:, 0] % 3, reduction="none")


def tied_gpt2() -> nn.Module:
    return gpt2_case(torch.float64).make()


def bert() -> nn.Module:
    return make_bert(pad_token_id=0).double()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double()


def lora_gpt2() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tied_gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.double()  # type: ignore[no-any-return]


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    private: PrivateTraining,
) -> None:
    """Algorithm 1 with the plan of `private`, none of its parts, and its random streams."""
    streams, data = RandomStreams(seed=SEED), Ragged()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for step in range(STEPS):
        sampler = PoissonSampler(
            dataset_size=RECORDS, sampling_prob=EXPECTED / RECORDS, streams=streams
        )
        sums = {name: torch.zeros_like(p) for name, p in trainable.items()}
        for index in sampler.indices(step).tolist():
            model.zero_grad()
            loss(model, padded([data[index]])).sum().backward()
            grads = {
                n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trainable.items()
            }
            norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
            for name, grad in grads.items():
                sums[name] += grad * min(1.0, CLIP / norm)
        for block in private.plan.blocks:
            squares = [sums[name].square().sum() for name in block.parameters]
            norm = float(torch.stack(squares).sum().sqrt())
            if block.batch_clip_norm is not None and norm > block.batch_clip_norm:
                for name in block.parameters:
                    sums[name] *= block.batch_clip_norm / norm
        stds = {n: b.noise_multiplier * CLIP for b in private.plan.blocks for n in b.parameters}
        key, following = streams.key("noise", step), 0
        for name, parameter in trainable.items():
            places = [Place(0, following + i) for i in range(parameter.numel())]
            drawn = [normal(key, place, wide=True) for place in places]
            noise = torch.tensor(drawn, dtype=torch.float64)
            following += parameter.numel()
            noisy = sums[name] + stds[name] * noise.view_as(parameter)
            parameter.grad = noisy / EXPECTED
        optimizer.step()
        model.zero_grad()
        if private.plan.permutes and private.spec is not None:
            apply(draw(private.spec, streams.key("permutation", step)), model, optimizer)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    held = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(held, lr=0.5, momentum=0.9, weight_decay=0.1)


UNSHUFFLED: dict[str, Any] = {"shuffle": "off"}
SHUFFLED: dict[str, Any] = {"shuffle": "every-step"}
PAPER: dict[str, Any] = SHUFFLED | {
    "accounting": "paper",
    "batch_clip_norm": 0.2,
    "unshuffled_noise_multiplier": 0.9,
}


@pytest.mark.parametrize(
    ("make", "loss", "settings"),
    [
        (tied_gpt2, next_words, SHUFFLED),
        (tied_gpt2, next_words, PAPER),
        (bert, first_word, PAPER),
        (llama, next_words, PAPER),
        (lora_gpt2, next_words, UNSHUFFLED),
    ],
)
def test_a_run_is_what_one_would_write_by_hand(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    settings: dict[str, Any],
) -> None:
    model, plain = make(), make()
    private = make_private(
        model,
        optimizer_of(model),
        dataset_size=RECORDS,
        expected_batch_size=EXPECTED,
        num_steps=STEPS,
        delta=1e-3,
        noise_multiplier=0.5,
        clip_norm=CLIP,
        seed=SEED,
        physical_batch_size=2,
        **settings,
    )
    sizes: list[int] = []
    private.on_update(lambda: sizes.append(private.last_sample_norms.numel()))
    for batch in private.batches(Ragged(), collate=padded):
        private.backward(loss(model, batch))
        private.step()
    assert min(sizes) == 0
    assert max(sizes) > 2
    train_by_hand(plain, optimizer_of(plain), loss, private)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12
