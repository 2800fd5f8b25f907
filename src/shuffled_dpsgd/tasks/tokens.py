"""Records of token ids, and batches of them padded so that no padding is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL


class PairIds(NamedTuple):
    """Token ids of a pair of texts, and which of the two each token belongs to (0 or 1)."""

    ids: list[int]
    type_ids: list[int]


# Token ids, and what belongs to them: a class, or the number of ids before the target.
Record = tuple[list[int] | PairIds, int]
TokenBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


def ids_of(record: Record) -> list[int]:
    """The token ids of a record."""
    return record[0].ids if isinstance(record[0], PairIds) else record[0]


class TokenRecords(Sequence[Record]):
    """Encoded records as a data set that knows how long each is."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]  # no slices
        return self._records[index]

    def length(self, index: int) -> int:
        """The number of token ids of a record."""
        return len(ids_of(self._records[index]))


@dataclass(frozen=True, kw_only=True)
class TokenCollate:
    """Pads records on the right, with an attention mask and labels that hide the padding.

    Pairs of texts carry `token_type_ids`; padding has type 0, as in pre-training.
    `labels(records, length)` makes the labels of a batch that is padded to `length`.
    """

    pad_id: int
    labels: Callable[[Sequence[Record], int], torch.Tensor]

    def __call__(self, samples: list[Record]) -> TokenBatch:
        """A batch padded to its longest record."""
        return self.to_length(samples, max((len(ids_of(s)) for s in samples), default=0))

    def to_length(self, samples: list[Record], length: int) -> TokenBatch:
        """A batch padded to `length`."""
        ids, mask = padded([ids_of(sample) for sample in samples], self.pad_id, length)
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        types = [sample[0].type_ids for sample in samples if isinstance(sample[0], PairIds)]
        if types:
            inputs["token_type_ids"] = padded(types, 0, length)[0]
        return inputs, self.labels(samples, length)


def class_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """One class a record."""
    return torch.tensor([label for _, label in samples])


def continuation_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """The ids themselves, where they are neither prompt nor padding."""
    labels, _ = padded([ids_of(sample) for sample in samples], IGNORED_LABEL, length)
    starts = torch.tensor([start for _, start in samples])
    return labels.masked_fill(torch.arange(length) < starts[:, None], IGNORED_LABEL)


def padded(
    rows: Sequence[Sequence[int]], value: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the right to `length`, and where they are not padding.

    >>> padded([[1], [2, 3]], 0, 3)[0].tolist()
    [[1, 0, 0], [2, 3, 0]]
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    is_token = np.arange(length) < lengths[:, None]
    filled = np.full((len(rows), length), value, dtype=np.int64)
    filled[is_token] = np.fromiter((i for row in rows for i in row), np.int64, int(lengths.sum()))
    return torch.from_numpy(filled), torch.from_numpy(is_token)
