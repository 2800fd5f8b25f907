"""Records of token ids, and batches of them padded so that no padding is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL

# Token ids, and what belongs to them: a class, or the number of ids before the target.
Record = tuple[list[int], int]
TokenBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


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
        return len(self._records[index][0])


@dataclass(frozen=True, kw_only=True)
class TokenCollate:
    """Pads records on the right, with an attention mask and labels that hide the padding.

    `labels(records, length)` makes the labels of a batch that is padded to `length`.
    """

    pad_id: int
    labels: Callable[[Sequence[Record], int], torch.Tensor]

    def __call__(self, samples: list[Record]) -> TokenBatch:
        """A batch padded to its longest record."""
        return self.to_length(samples, max((len(ids) for ids, _ in samples), default=0))

    def to_length(self, samples: list[Record], length: int) -> TokenBatch:
        """A batch padded to `length`."""
        ids, mask = padded([ids for ids, _ in samples], self.pad_id, length)
        return {"input_ids": ids, "attention_mask": mask.long()}, self.labels(samples, length)


def class_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """One class a record."""
    return torch.tensor([label for _, label in samples])


def continuation_labels(samples: Sequence[Record], length: int) -> torch.Tensor:
    """The ids themselves, where they are neither prompt nor padding."""
    labels, _ = padded([ids for ids, _ in samples], IGNORED_LABEL, length)
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
