"""A Trainer's collator that can also pad to a length it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True)
class PaddedCollator:
    """Widens the token inputs of a batch on the right, where an attention mask hides it.

    A batch without an attention mask stays as it is, because its padding would be seen. So does
    an input that is not one number a token.
    """

    collate: Callable[[list[Any]], Any]
    pad_id: int

    def __call__(self, samples: list[Any]) -> Any:
        """The batch as the collator makes it."""
        return self.collate(samples)

    def to_length(self, samples: list[Any], length: int) -> Any:
        """The batch with every sample padded to `length` tokens."""
        batch = self.collate(samples)
        if not isinstance(batch, Mapping) or not {"input_ids", "attention_mask"} <= batch.keys():
            return batch
        shape = batch["input_ids"].shape
        values = {"input_ids": self.pad_id, "labels": IGNORED_LABEL}
        return {
            key: F.pad(value, (0, length - shape[1]), value=values.get(key, 0))
            if getattr(value, "shape", None) == shape and length > shape[1]
            else value
            for key, value in batch.items()
        }


def with_lengths(collate: Callable[[list[Any]], Any], tokenizer: Any) -> Callable[[list[Any]], Any]:
    """The collator as a `PaddedCollator`, if the tokenizer pads on the right and knows its id."""
    pad_id = getattr(tokenizer, "pad_token_id", None)
    if pad_id is None or getattr(tokenizer, "padding_side", "right") != "right":
        return collate
    return PaddedCollator(collate=collate, pad_id=int(pad_id))
