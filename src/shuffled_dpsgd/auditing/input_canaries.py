"""Canaries in input space: records that a model only fits if it saw them.

They go through the model like any record, so their gradients are clipped, noised and shuffled as
in training; the adversary needs nothing but the model's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.training.data import MapStyle, shaped, to_device
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining

InputCanary = Literal["mislabelled", "blank", "scrambled", "new-token"]
SCORING_BATCH = 64


def check_kind(kind: str) -> None:
    """Refuse a kind of canary that there is none of."""
    require(kind in get_args(InputCanary), "input_canary", f"one of {get_args(InputCanary)}", kind)


class Extended:
    """A data set followed by extra records, without copying either."""

    def __init__(self, data: MapStyle, extra: Sequence[Any]) -> None:
        self._data = data
        self._extra = extra

    def __len__(self) -> int:
        return len(self._data) + len(self._extra)

    def __getitem__(self, index: int) -> Any:
        size = len(self._data)
        return self._data[index] if index < size else self._extra[index - size]


class Leaving(PoissonSampler):
    """A sampler's own draws without some of the records: they take part in no step."""

    def __init__(self, inner: PoissonSampler, left_out: NDArray[np.integer[Any]]) -> None:
        # Where a batch is cut, a record that is left out would still displace another.
        require(inner.largest_batch is None, "largest_batch", "none", inner.largest_batch)
        self._inner = inner
        self.dataset_size = inner.dataset_size
        self._left_out = torch.from_numpy(np.asarray(left_out, dtype=np.int64))

    def indices(self, step: int) -> torch.Tensor:
        drawn = self._inner.indices(step)
        return drawn[~torch.isin(drawn, self._left_out.to(drawn.device))]


def label_of(record: Any) -> int:
    """The class of an (input, label) record; anything else is refused."""
    if isinstance(record, tuple | list) and len(record) == 2:
        label = record[1]
        if isinstance(label, int) or (
            isinstance(label, torch.Tensor) and label.ndim == 0 and not label.is_floating_point()
        ):
            return int(label)
    raise InvalidArgumentError(
        "record",
        expected="an (input, integer label) pair",
        got=type(record).__name__,
        remedy="give your own canaries for other kinds of records",
    )


def mislabelled(data: MapStyle, count: int, rng: np.random.Generator) -> list[Any]:
    """Records of `data` with a wrong label, drawn uniformly among the other classes."""
    _check_count(data, count)
    chosen = rng.choice(len(data), size=count, replace=False)
    num_classes = 1 + max(label_of(data[int(i)]) for i in range(min(len(data), 2000)))
    if num_classes < 2:
        raise InvalidArgumentError("data", expected="at least two classes", got=num_classes)
    return [
        _with_label(data[int(i)], int(rng.integers(1, num_classes)), num_classes) for i in chosen
    ]


def blank(data: MapStyle, count: int, rng: np.random.Generator) -> list[Any]:
    """Records whose input is zero everywhere, each with a label of `data`."""
    _check_count(data, count)
    records = []
    for i in rng.choice(len(data), size=count, replace=False):
        record = data[int(i)]
        label_of(record)
        if not isinstance(record[0], torch.Tensor) or not record[0].is_floating_point():
            raise InvalidArgumentError(
                "data", expected="floating-point inputs to blank", got=type(record[0]).__name__
            )
        records.append(type(record)((torch.zeros_like(record[0]), record[1])))
    return records


def scrambled(data: MapStyle, count: int, rng: np.random.Generator) -> list[Any]:
    """Token sequences (ids, length of the prompt) whose continuation is uniformly random.

    For language models: a text nobody writes, which a model only predicts if it saw it. Ids are
    drawn up to the largest one in the first records.
    """
    largest = max(max(ids) for ids, _ in _continuations(data, count))
    records = []
    for i in rng.choice(len(data), size=count, replace=False):
        ids, prompt = data[int(i)]
        drawn = rng.integers(largest + 1, size=len(ids) - prompt).tolist()
        records.append(([*ids[:prompt], *drawn], prompt))
    return records


def new_token(
    data: MapStyle, count: int, rng: np.random.Generator, model: torch.nn.Module
) -> list[Any]:
    """Prompts of `data`, each continued by one token that is in no record and no other canary.

    For language models (Panda et al. 2025): only the last token is scored, and what the model
    learns of it, it learns from the canary alone. Tokens are those of the model's vocabulary that
    no record has; where these are fewer than the canaries, there are none of this kind.
    """
    _continuations(data, count)
    vocabulary = _vocabulary(model)
    used = set[int]().union(*(data[i][0] for i in range(len(data))))
    unused = sorted(set(range(vocabulary)) - used)
    expected = f"at most {len(unused)}: tokens of the vocabulary that are in no record"
    remedy = "plant fewer, or scrambled ones"
    require(len(unused) >= count, "input_canaries", expected, count, remedy)
    chosen = rng.choice(len(data), size=count, replace=False)
    tokens = rng.choice(unused, size=count, replace=False)
    prompts = (data[int(i)][0][: max(data[int(i)][1], 1)] for i in chosen)
    return [
        ([*prompt, int(token)], len(prompt)) for prompt, token in zip(prompts, tokens, strict=True)
    ]


def plant(
    kind: InputCanary, data: MapStyle, count: int, rng: np.random.Generator, model: torch.nn.Module
) -> list[Any]:
    """`count` canaries of one kind for this model, none for zero."""
    if count == 0:
        return []
    if kind == "new-token":
        return new_token(data, count, rng, model)
    makers = {"mislabelled": mislabelled, "blank": blank, "scrambled": scrambled}
    return makers[kind](data, count, rng)


def losses_of(
    private: PrivateTraining,
    records: Sequence[Any],
    losses: PerSampleLoss,
    collate: Callable[[list[Any]], Any],
) -> Floats:
    """The loss of every record under the current model, in evaluation mode: what a query shows."""
    was_training = private.model.training
    private.model.eval()
    found = []
    with torch.no_grad():
        for first in range(0, len(records), SCORING_BATCH):
            batch = collate(list(records[first : first + SCORING_BATCH]))
            batch = to_device(shaped(batch), private.device)
            found.append(losses(private.model, batch).double().cpu())
    private.model.train(was_training)
    return np.asarray(torch.cat(found).numpy(), dtype=np.float64)


def _continuations(data: MapStyle, count: int) -> list[Any]:
    """The first records, which must be (ids, length of the prompt) pairs."""
    _check_count(data, count)
    sample = [data[i] for i in range(min(len(data), 2000))]
    if not isinstance(sample[0][0], list) or not isinstance(sample[0][1], int):
        raise InvalidArgumentError(
            "data",
            expected="(list of ids, length of the prompt) records",
            got=f"({type(sample[0][0]).__name__}, {type(sample[0][1]).__name__})",
            remedy="for labelled records take mislabelled or blank",
        )
    return sample


def _vocabulary(model: torch.nn.Module) -> int:
    """How many tokens a language model has embeddings for."""
    find: Any = getattr(model, "get_input_embeddings", None)
    embeddings = None if find is None else find()
    if not isinstance(embeddings, torch.nn.Embedding):
        raise InvalidArgumentError(
            "model", expected="a language model with token embeddings", got=type(model).__name__
        )
    return embeddings.num_embeddings


def _with_label(record: Any, shift: int, num_classes: int) -> Any:
    label = (label_of(record) + shift) % num_classes
    kept = torch.tensor(label) if isinstance(record[1], torch.Tensor) else label
    return type(record)((record[0], kept))


def _check_count(data: MapStyle, count: int) -> None:
    if not 0 < count <= len(data):
        raise InvalidArgumentError("count", expected=f"from 1 to {len(data)}", got=count)
