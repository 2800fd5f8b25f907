"""Image classification: pixels scaled and resized to what the model expects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shuffled_dpsgd.tasks.augmentation import ImageViews, take_views
from shuffled_dpsgd.tasks.classes import name_classes, stated_classes
from shuffled_dpsgd.tasks.classification import classification_task
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.data.loading import check_sizes, read_images, require_task
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.task import Task


def build_task(config: RunConfig) -> Task:
    """Fine-tune an image classifier; pixels are scaled to [-1, 1], as the ViT models expect."""
    require_task(config.data, "image-classification")
    num_labels = stated_classes(config.data)
    splits = read_images(config.data, num_labels)
    check_sizes(splits, batch=config.training.expected_batch_size)
    views = config.training.augmentation_multiplicity

    def fresh_model(seed: int) -> nn.Module:
        model = prepare_model(config.model, head="image", num_labels=num_labels, seed=seed)
        name_classes(model, config.data, num_labels)
        return take_views(model) if views else model

    model = fresh_model(config.init_seed)
    size = int(model.config.image_size)  # type: ignore[union-attr,arg-type]
    return classification_task(
        "image-classification",
        model,
        splits,
        fresh_model=fresh_model,
        collate=lambda samples: collate_images(samples, size),
        save_assets=lambda directory: save_processor(directory, size),
        augment=ImageViews(views, flips=True) if views else None,
    )


def save_processor(directory: Path, size: int, *, mean: float = 0.5, std: float = 0.5) -> None:
    """What `AutoImageProcessor` needs to treat an image as `collate_images` does.

    Another `mean` and `std` of pixels from 0 to 1 suit a model that was trained on those.
    """
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": 3 * [mean],
        "image_std": 3 * [std],
    }
    text = json.dumps(processor, indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")


def collate_images(
    samples: Sequence[tuple[Any, int]], size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack, scale to [-1, 1] and resize to `size` × `size`."""
    images = torch.stack([_as_tensor(image) for image, _ in samples]).float() / 127.5 - 1.0
    if images.shape[-2:] != (size, size):
        images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return images, torch.tensor([int(label) for _, label in samples])


def _as_tensor(image: Any) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        return image
    import numpy as np

    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
