"""Private SGD steps to attack: one of the old generator, and one of the library as users have it.

Both train a classifier of bags of tokens. Its embedding has more rows than the data have tokens,
as vocabularies do, and the adversary sees the weights before and after the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from attacks import sfc64
from attacks.recover import Observation, observe
from shuffled_dpsgd import make_private

VOCABULARY, TOKENS_IN_USE, WIDTH, CLASSES, RECORDS = 4000, 100, 32, 3, 64
LR, NOISE_STD, EXPECTED_BATCH_SIZE = 1.0, 1.146, 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """The weights before and after a step, and where no record has a gradient."""

    before: NDArray[np.float32]
    after: NDArray[np.float32]
    untouched: NDArray[np.bool_]

    @property
    def seen(self) -> Observation:
        """The noise, where it can be read off."""
        return observe(
            self.before,
            self.after,
            self.untouched,
            lr=LR,
            noise_std=NOISE_STD,
            expected_batch_size=EXPECTED_BATCH_SIZE,
        )


class Classifier(nn.Module):
    """The mean of the tokens' embeddings, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, CLASSES))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of bags."""
        return self.head(self.embedding(tokens).mean(dim=1))


def old_step(seed: int) -> tuple[Step, NDArray[np.float32]]:
    """A step with noise from SFC64, and that noise in units of its standard deviation."""
    rng = np.random.default_rng(seed)
    size = _flat(Classifier()).size
    untouched = _untouched(size)
    before = rng.normal(0, 0.02, size).astype(np.float32)
    sums = np.where(untouched, 0, rng.standard_normal(size)).astype(np.float32)
    noise = sfc64.standard_normal(np.random.Generator(np.random.SFC64(seed)), size)
    released = (sums + np.float32(NOISE_STD) * noise) / np.float32(EXPECTED_BATCH_SIZE)
    after = before - np.float32(LR) * released
    return Step(before=before, after=after, untouched=untouched), noise


def real_step() -> Step:
    """A step of `make_private` with default settings, without a seed."""
    model = Classifier()
    data = TensorDataset(
        torch.randint(TOKENS_IN_USE, (RECORDS, 5)), torch.randint(CLASSES, (RECORDS,))
    )
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=LR),
        dataset_size=RECORDS,
        expected_batch_size=EXPECTED_BATCH_SIZE,
        num_steps=1,
        noise_multiplier=NOISE_STD,
        delta=1e-3,
    )
    before = _flat(model)
    for tokens, classes in private.batches(data):
        private.backward(F.cross_entropy(model(tokens), classes, reduction="none"))
        private.step()
    assert private.finished
    return Step(before=before, after=_flat(model), untouched=_untouched(before.size))


def _flat(model: nn.Module) -> NDArray[np.float32]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def _untouched(size: int) -> NDArray[np.bool_]:
    """The embedding comes first, and the data use its first rows."""
    untouched = np.zeros(size, dtype=bool)
    untouched[TOKENS_IN_USE * WIDTH : VOCABULARY * WIDTH] = True
    return untouched
