"""The embedded default: a small vision Transformer on scikit-learn's handwritten digits.

1,797 images of 8 × 8 pixels ship with scikit-learn, so nothing is downloaded. The split is fixed
(it does not follow the run's seed), so scores of different runs compare.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from shuffled_dpsgd.errors import MissingExtraError
from shuffled_dpsgd.tasks.classification import Collate
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.config_files import parse_config
from shuffled_dpsgd.tasks.data.loading import Splits
from shuffled_dpsgd.tasks.images import image_task
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.recipes import RECIPES
from shuffled_dpsgd.tasks.task import Task

NUM_TRAIN = 1_437
SPLIT_SEED = 0
# Constants of the published collection, not statistics of the training split: those would leak.
PIXEL_MEAN, PIXEL_STD = 4.9, 6.0
LARGEST_PIXEL = 16.0


def default_config() -> RunConfig:
    """What `train digits` runs without any flag; certified ε is calibrated, not the paper's."""
    raw = RECIPES["recipe/digits"].to_run()
    raw["privacy"]["epsilon"] = 3.0
    return parse_config(raw)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, shape (1, 8, 8), about mean 0 and std 1, with their labels."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingExtraError("scikit-learn", extra="hf", purpose="the digits") from error
    bunch = load()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    images = (images - PIXEL_MEAN) / PIXEL_STD
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, heldout = order[:NUM_TRAIN], order[NUM_TRAIN:]
    found = [TensorDataset(images[part], labels[part]) for part in (train, heldout)]
    return found[0], found[1]


def build_model(seed: int = 0) -> nn.Module:
    """The small ViT: 4 × 4 patches, two layers, four heads, hidden size 32; 18 thousand weights."""
    config = default_config().model
    return prepare_model(config, head="image", num_labels=10, seed=seed)


def build_task(config: RunConfig) -> Task:
    """The digits task with the model `config` names."""
    train, heldout = load_digits()
    splits: Splits[Any] = Splits(train=train, heldout={"test": heldout})

    def repeated(channels: int, samples: list[Any]) -> Any:
        images, labels = default_collate(samples)
        return images.expand(-1, channels, -1, -1), labels

    def collate(known: Any) -> Collate:
        return None if known.num_channels == 1 else partial(repeated, int(known.num_channels))

    # Mirrored digits are no digits.
    return image_task(config, splits, 10, collate=collate, flips=False)
