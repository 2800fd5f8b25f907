"""A Trainer's batches widened to a length, where a mask hides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from shuffled_dpsgd.integrations.trainer_parts import PaddedCollator, with_lengths
from shuffled_dpsgd.training.data import LengthCollate

BATCH = {
    "input_ids": torch.tensor([[5, 6], [7, 0]]),
    "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    "labels": torch.tensor([[5, 6], [7, -100]]),
    "score": torch.tensor([1.0, 2.0]),
}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    return dict(BATCH)


def test_tokens_mask_and_labels_are_widened_and_nothing_else() -> None:
    wide = PaddedCollator(collate=collate, pad_id=9).to_length([], 4)
    assert wide["input_ids"].tolist() == [[5, 6, 9, 9], [7, 0, 9, 9]]
    assert wide["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert wide["labels"].tolist() == [[5, 6, -100, -100], [7, -100, -100, -100]]
    assert wide["score"].tolist() == [1.0, 2.0]
    assert PaddedCollator(collate=collate, pad_id=9)([])["input_ids"].shape == (2, 2)


def test_what_no_mask_hides_stays_as_it_is() -> None:
    bare = {"input_ids": BATCH["input_ids"]}
    assert PaddedCollator(collate=lambda _: bare, pad_id=9).to_length([], 4) is bare


def test_only_tokenizers_that_pad_on_the_right_are_helped() -> None:
    right = SimpleNamespace(pad_token_id=3, padding_side="right")
    assert isinstance(with_lengths(collate, right), LengthCollate)
    for other in (None, SimpleNamespace(pad_token_id=3, padding_side="left")):
        assert with_lengths(collate, other) is collate
