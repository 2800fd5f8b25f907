"""The training settings of the paper's Table 1 that its figures 3 and 4 draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model on one data set; batch 1000, T = epochs · ⌈N/B⌉, q = B/N."""

    label: str
    dimension: int
    dataset_size: int
    epochs: int
    delta: float

    @property
    def sampling_prob(self) -> float:
        return BATCH_SIZE / self.dataset_size

    @property
    def num_steps(self) -> int:
        return self.epochs * math.ceil(self.dataset_size / BATCH_SIZE)


VIT = Setting(
    label="ViT, CIFAR-100", dimension=85_800_000, dataset_size=50_000, epochs=10, delta=5e-6
)
# The paper says "six representative experiments" and names the models; the data sets of BERT,
# RoBERTa and GPT-2 are not stated, and these are the first of each in its tables.
SIX = (
    VIT,
    Setting(
        label="BERT, SST-2",
        dimension=110_000_000,
        dataset_size=67_349,
        epochs=3,
        delta=1 / (2 * 67_349),
    ),
    Setting(
        label="RoBERTa, SST-2",
        dimension=125_000_000,
        dataset_size=67_349,
        epochs=3,
        delta=1 / (2 * 67_349),
    ),
    Setting(label="GPT-2, E2E", dimension=124_000_000, dataset_size=42_043, epochs=10, delta=8e-6),
    Setting(
        label="GPT-2-large, E2E", dimension=838_000_000, dataset_size=42_043, epochs=10, delta=8e-6
    ),
    Setting(
        label="GPT-2-large, DART",
        dimension=838_000_000,
        dataset_size=60_591,
        epochs=15,
        delta=1e-5,
    ),
)
