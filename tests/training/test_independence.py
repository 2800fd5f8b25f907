"""Losses that see padding or average over a batch's tokens are noticed; honest ones pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import make_private
from training.cases import (
    bert_case,
    gpt2_case,
    make_bert,
    make_mlp,
    mlp_case,
    vectors,
    vit_case,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the most frequent row"),
    pytest.mark.filterwarnings("ignore:δ = "),
]


def noise_of_its_own(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch.x)
    return F.cross_entropy(logits + torch.randn_like(logits), batch.y, reduction="none")


def steps(model: nn.Module, data: Any, loss: Any, *, collate: Any = None, **changes: Any) -> Any:
    """A run of a few steps with the loss handed over; its card."""
    settings = {
        "dataset_size": len(data),
        "expected_batch_size": len(data) // 2,
        "num_steps": 2,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
        "seed": 1,
        "loss": loss,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = make_private(model, optimizer, **(settings | changes))
    try:
        for batch in private.batches(data, collate=collate):
            private.backward(loss(model, batch))
            private.step()
    except InvalidArgumentError:
        assert private.ledger.spent == 0
        raise
    finally:
        private.close()
    return private.card()


def test_noise_of_each_record_is_repeated() -> None:
    steps(make_mlp(), vectors(), noise_of_its_own)


class Ragged(list[torch.Tensor]):
    """Sentences of different lengths."""

    def __init__(self) -> None:
        super().__init__(torch.arange(3, 5 + place % 6) for place in range(24))


def padded(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_padding_without_a_mask_is_noticed() -> None:
    model = make_bert(initializer_range=0.3)

    def loss(mask: bool) -> Any:
        def of(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs = batch if mask else {"input_ids": batch["input_ids"]}
            return model(**inputs).logits.square().sum(1)

        return of

    steps(model, Ragged(), loss(True), collate=padded)
    model = make_bert(initializer_range=0.3)
    with pytest.raises(InvalidArgumentError, match="mask padding"):
        steps(model, Ragged(), loss(False), collate=padded)


def test_a_mean_over_the_tokens_of_a_batch_is_no_mean_of_losses() -> None:
    model = make_bert(initializer_range=0.3)

    def over_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
        mask = batch["attention_mask"]
        return (model(**batch).logits.square().sum(1) * mask.sum(1)).sum() / mask.sum()

    def over_records(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(**batch).logits.square().sum(1).mean()

    steps(model, Ragged(), over_records, collate=padded, loss_reduction="mean")
    model = make_bert(initializer_range=0.3)
    with pytest.raises(InvalidArgumentError, match="own tokens"):
        steps(model, Ragged(), over_tokens, collate=padded, loss_reduction="mean")


@pytest.mark.parametrize("case", [mlp_case(), bert_case(), gpt2_case(), vit_case()])
def test_honest_losses_pass_and_nothing_is_left_behind(case: Any) -> None:
    model = case.make()
    model[0].eval() if isinstance(model, nn.Sequential) else None
    modes = [module.training for module in model.modules()]
    card = steps(model, case.data, case.loss)
    assert "not checked" not in str(card)
    assert [module.training for module in model.modules()] == modes


def test_what_records_are_padded_to_beside_random_numbers_is_listed_as_not_checked() -> None:
    model = make_bert(initializer_range=0.3)

    def jittered(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = model(**batch).logits.square().sum(1)
        return losses * (1 + 0.1 * torch.rand(len(losses)))

    assert "what it is padded to" in str(steps(model, Ragged(), jittered, collate=padded))
