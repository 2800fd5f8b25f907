"""Image classification: pixels as the model expects them, and several views of an image.

The views of a record are K rows of the batch; its loss is the mean over them (De et al., 2022). The
record has one gradient, which is clipped once, so the accounting does not change.

Shapes: B records, K views, C channels, H × W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shuffled_dpsgd.tasks.classification import (
    Collate,
    classification_task,
    name_classes,
    stated_classes,
)
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.data.image_files import folder_classes
from shuffled_dpsgd.tasks.data.loading import Splits, check_sizes, read_images, require_task
from shuffled_dpsgd.tasks.data.sources import folder_of
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.task import Task

# Images are shifted by at most 1/8 of a side: four pixels of 32.
_SHIFT = 8


def build_task(config: RunConfig) -> Task:
    """Fine-tune an image classifier; pixels are scaled to [-1, 1], as the ViT models expect."""
    require_task(config.data, "image-classification")
    if config.data.format == "image-folder":
        names = config.data.label_names or folder_classes(folder_of(config.data))
        known = config.data.num_labels or len(names)
        config = replace(config, data=replace(config.data, label_names=names, num_labels=known))
    num_labels = stated_classes(config.data)
    return image_task(
        config,
        read_images(config.data, num_labels),
        num_labels,
        collate=lambda known: partial(collate_images, size=int(known.image_size)),
        save_assets=lambda folder, known: save_processor(folder, int(known.image_size)),
        flips=True,
    )


def image_task(
    config: RunConfig,
    splits: Splits[Any],
    num_labels: int,
    *,
    collate: Callable[[Any], Collate],
    save_assets: Callable[[Path, Any], None] | None = None,
    flips: bool,
) -> Task:
    """An image task; `collate` and `save_assets` are given the model's configuration."""
    check_sizes(splits, batch=config.training.expected_batch_size)
    views = config.training.augmentation_multiplicity

    def fresh_model(seed: int) -> nn.Module:
        model = prepare_model(config.model, head="image", num_labels=num_labels, seed=seed)
        name_classes(model, config.data, num_labels)
        return take_views(model) if views else model

    model: Any = fresh_model(config.init_seed)
    return classification_task(
        config.task,
        model,
        splits,
        fresh_model=fresh_model,
        collate=collate(model.config),
        save_assets=None
        if save_assets is None
        else lambda folder: save_assets(folder, model.config),
        augment=ImageViews(views, flips=flips) if views else None,
    )


def save_processor(directory: Path, size: int) -> None:
    """Write what `AutoImageProcessor` needs to prepare an image as `collate_images` does."""
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": 3 * [0.5],
        "image_std": 3 * [0.5],
    }
    text = json.dumps(processor, indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")


def collate_images(
    samples: Sequence[tuple[Any, int]], size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack, scale to [-1, 1] and resize to `size` × `size`; PIL images may differ in size."""
    labels = torch.tensor([int(label) for _, label in samples])
    if all(isinstance(image, torch.Tensor) for image, _ in samples):
        return _fitted(torch.stack([image for image, _ in samples]), size), labels
    import numpy as np

    pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1) for image, _ in samples)
    return torch.cat([_fitted(each[None], size) for each in pixels]), labels


def _fitted(pixels: torch.Tensor, size: int) -> torch.Tensor:
    images = pixels.float() / 127.5 - 1.0
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


class ImageViews:
    """Shifts each image by up to an eighth of its side, and mirrors it or not, K times over.

    Pixels that a shift brings in mirror those at the edge.
    """

    def __init__(self, multiplicity: int, *, flips: bool) -> None:
        self._multiplicity = multiplicity
        self._flips = flips

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        """(images, labels) with images (B, C, H, W) in, (B, K, C, H, W) out."""
        images, labels = batch
        size, count = len(images), self._multiplicity
        height, width = images.shape[-2:]

        def draw(high: int) -> torch.Tensor:
            drawn = torch.randint(high, (size, count, 1), generator=generator)
            return drawn.to(images.device)

        rows_BKH = torch.arange(height, device=images.device) + draw(2 * (height // _SHIFT) + 1)
        columns_BKW = torch.arange(width, device=images.device) + draw(2 * (width // _SHIFT) + 1)
        rows_BKH = _reflected(rows_BKH - height // _SHIFT, height)
        columns_BKW = _reflected(columns_BKW - width // _SHIFT, width)
        if self._flips:
            columns_BKW = (columns_BKW - draw(2) * (width - 1)).abs()
        records = torch.arange(size, device=images.device).view(-1, 1, 1, 1, 1)
        channels = torch.arange(images.shape[1], device=images.device).view(-1, 1, 1)
        rows, columns = rows_BKH[:, :, None, :, None], columns_BKW[:, :, None, None, :]
        return images[records, channels, rows, columns], labels


def _reflected(places: torch.Tensor, length: int) -> torch.Tensor:
    """Places outside of 0 … length - 1 mirrored at the ends.

    >>> _reflected(torch.tensor([-2, -1, 0, 3, 4]), 4).tolist()
    [2, 1, 0, 3, 2]
    """
    last = length - 1
    return last - (last - places.abs()).abs()


class TakesViews:
    """A forward for an image classifier that also takes images (B, K, C, H, W).

    For these it returns logits (B, K, classes). It is an attribute of the instance, so that the
    model keeps its class and its parameters' names. It is an object and not a closure, so that
    `deepcopy` copies the model inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self._plain = model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        images, *rest = (*args, *kwargs.values())
        if rest or not isinstance(images, torch.Tensor) or images.dim() != 5:
            return self._plain(*args, **kwargs)
        logits = self._plain(images.flatten(0, 1)).logits
        return logits.unflatten(0, images.shape[:2])


def take_views(model: nn.Module) -> nn.Module:
    """Let `model` take several views of each image; images without views are taken as before."""
    model.forward = TakesViews(model)
    return model
