"""The embedded default: a small vision Transformer on scikit-learn's handwritten digits.

1,797 images of 8 × 8 pixels ship with scikit-learn, so nothing is downloaded. The split is fixed
(it does not follow the run's seed), so scores of different runs compare.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import MissingExtraError
from shuffled_dpsgd.tasks.augmentation import ImageViews, take_views
from shuffled_dpsgd.tasks.classes import name_classes
from shuffled_dpsgd.tasks.classification import classification_task
from shuffled_dpsgd.tasks.config import (
    ModelConfig,
    OptimizerConfig,
    PrivacyConfig,
    RunConfig,
    ScheduleConfig,
)
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import Splits, check_sizes
from shuffled_dpsgd.tasks.images import save_processor
from shuffled_dpsgd.tasks.models import prepare_model

if TYPE_CHECKING:
    from shuffled_dpsgd.tasks.task import Task

NUM_TRAIN = 1_437
SPLIT_SEED = 0
# Constants of the published collection, not statistics of the training split: those would leak.
PIXEL_MEAN, PIXEL_STD = 4.9, 6.0
LARGEST_PIXEL = 16.0
COLOURS = 3


def default_config() -> RunConfig:
    """What `train digits` runs without any flag; certified ε is calibrated, not the paper's."""
    return RunConfig(
        task="digits",
        model=ModelConfig(name="vit-digits"),
        data=DataConfig(format="digits"),
        privacy=PrivacyConfig(epsilon=3.0, delta=1e-4, clip_norm=1.0),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine"),
        training=ScheduleConfig(
            expected_batch_size=288,
            epochs=50,
            physical_batch_size=512,
            evaluate_every=5,
            checkpoint_every=50,
            num_threads=1,  # tensors this small only wait for each other on more
        ),
        seed=0,
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, shape (1, 8, 8), about mean 0 and std 1, with their labels."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingExtraError("scikit-learn", extra="digits", purpose="the digits") from error
    bunch = load()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    images = (images - PIXEL_MEAN) / PIXEL_STD
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, heldout = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[heldout], labels[heldout]),
    )


def build_model(seed: int = 0) -> nn.Module:
    """The small ViT: 4 × 4 patches, two layers, four heads, hidden size 32; 18 thousand weights."""
    return prepare_model(ModelConfig(name="vit-digits"), head="image", num_labels=10, seed=seed)


def build_task(config: RunConfig) -> Task:
    """The digits task with the model `config` names."""
    train, heldout = load_digits()
    splits: Splits[Any] = Splits(train=train, heldout={"test": heldout})
    check_sizes(splits, batch=config.training.expected_batch_size)
    views = config.training.augmentation_multiplicity

    def fresh_model(seed: int) -> nn.Module:
        model = prepare_model(config.model, head="image", num_labels=10, seed=seed)
        name_classes(model, config.data, 10)
        return take_views(model) if views else model

    model = fresh_model(config.init_seed)
    channels = int(model.config.num_channels)  # type: ignore[union-attr,arg-type]
    return classification_task(
        "digits",
        model,
        splits,
        fresh_model=fresh_model,
        collate=None if channels == 1 else partial(_collate_in_channels, channels),
        save_assets=prepare_for_pipelines,
        # Mirrored digits are no digits.
        augment=ImageViews(views, flips=False) if views else None,
    )


def prepare_for_pipelines(directory: Path) -> None:
    """Let a saved model take colour images, and say how pixels are scaled.

    `transformers.pipeline` makes every image one of three channels. The first layer's kernel for
    the one grey channel becomes three equal ones of a third each: of a grey image, whose channels
    are equal, the model makes what it did before.
    """
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    kernels = [name for name in tensors if name.endswith("patch_embeddings.projection.weight")]
    if len(kernels) != 1:
        return  # not a ViT or a relative: its first layer is not known here
    grey = tensors[kernels[0]]
    if grey.shape[1] == 1:
        tensors[kernels[0]] = (grey / COLOURS).repeat(1, COLOURS, 1, 1).contiguous()
        save_file(tensors, weights, metadata={"format": "pt"})
        path = directory / "config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) | {"num_channels": COLOURS}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    size = int(json.loads((directory / "config.json").read_text())["image_size"])
    save_processor(directory, size, mean=PIXEL_MEAN / LARGEST_PIXEL, std=PIXEL_STD / LARGEST_PIXEL)


def _collate_in_channels(
    channels: int, samples: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.stack([image for image, _ in samples])
    return images.expand(-1, channels, -1, -1), torch.stack([label for _, label in samples])
