"""Per-sample losses add up to the model's own loss, and depend on their own sample only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.integrations.per_sample_loss import (
    IGNORED_LABEL,
    classification_losses,
    head_of,
    next_token_losses,
    per_sample_losses,
    token_losses,
)

transformers = pytest.importorskip("transformers")


def tiny_gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


def test_next_token_losses_are_the_models_loss_sample_by_sample() -> None:
    model = tiny_gpt2()
    with torch.no_grad():
        # Losses far enough apart that how they are averaged shows.
        model.lm_head.weight.mul_(50.0)
    ids = torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = IGNORED_LABEL
    labels[1, 6:] = IGNORED_LABEL
    losses = per_sample_losses(model, model(input_ids=ids), labels)
    for i in range(3):
        alone = model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss
        torch.testing.assert_close(losses[i].double(), alone.double(), rtol=1e-5, atol=1e-6)
    batch_loss = model(input_ids=ids, labels=labels).loss
    assert not torch.isclose(losses.mean().double(), batch_loss.double(), rtol=1e-4)


def test_token_losses_do_not_shift() -> None:
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 2] = 50.0
    labels = torch.tensor([[2, IGNORED_LABEL]])
    assert token_losses(logits, labels).item() == pytest.approx(0.0, abs=1e-6)
    assert next_token_losses(logits, torch.tensor([[0, 2]])).item() == pytest.approx(0.0, abs=1e-6)


def test_classification_losses_by_kind_of_label() -> None:
    logits = torch.tensor([[2.0, -1.0], [0.0, 0.0]])
    cross = classification_losses(logits, torch.tensor([0, 1]))
    assert cross[1].item() == pytest.approx(0.6931, abs=1e-4)
    regression = classification_losses(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    assert regression.tolist() == [0.0, 4.0]
    several = classification_losses(logits, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert several.shape == (2,)


def test_unknown_heads_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="per_sample_loss"):
        head_of(torch.nn.Linear(2, 2))


def test_heads_are_recognised_by_class_name() -> None:
    config = transformers.BertConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    assert head_of(transformers.BertForSequenceClassification(config)) == "classification"
    assert head_of(transformers.BertForMaskedLM(config)) == "tokens"
    assert head_of(tiny_gpt2()) == "next-token"
