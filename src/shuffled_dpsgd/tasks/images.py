"""Image classification from CIFAR arrays or the hub, resized to what the model expects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import hub
from shuffled_dpsgd.tasks.arrays import read_cifar
from shuffled_dpsgd.tasks.classes import name_classes, stated_classes
from shuffled_dpsgd.tasks.classification import classification_task
from shuffled_dpsgd.tasks.config import DataConfig, RunConfig
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.parts import check_sizes, drawn_part
from shuffled_dpsgd.tasks.task import Task


class ArrayImages:
    """Images uint8 (N, H, W, 3) and labels as a map-style data set of (image, label)."""

    def __init__(self, images: Any, labels: Any) -> None:
        self._images = torch.as_tensor(images)
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index].permute(2, 0, 1), int(self.labels[index])


def build_task(config: RunConfig) -> Task:
    """Fine-tune an image classifier; pixels are scaled to [-1, 1], as the ViT models expect."""
    num_labels = stated_classes(config.data)
    train, heldout = _read(config.data, num_labels)
    check_sizes(config, train, heldout)
    model = prepare_model(config.model, head="image", num_labels=num_labels, seed=config.init_seed)
    size = int(model.config.image_size)  # type: ignore[union-attr,arg-type]
    name_classes(model, config.data, num_labels)
    return classification_task(
        "image-classification",
        model,
        train,
        heldout,
        collate=lambda samples: collate_images(samples, size),
        save_assets=lambda directory: _save_processor(directory, size),
    )


def _save_processor(directory: Path, size: int) -> None:
    """What `AutoImageProcessor` needs to treat an image as `collate_images` does."""
    half = [0.5, 0.5, 0.5]
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": half,
        "image_std": half,
    }
    text = json.dumps(processor, indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _read(data: DataConfig, num_labels: int) -> tuple[Any, Any]:
    """Training and held-out records."""
    if data.format == "hub":
        return hub.read_images(data, num_labels)
    if data.format != "cifar":
        raise InvalidArgumentError(
            "data.format", expected="cifar or hub for this task", got=data.format
        )
    if data.path is None:
        raise InvalidArgumentError("data.path", expected="a folder or an .npz file", got=None)
    parts = []
    limits = {"train": data.max_train_examples, "test": data.max_heldout_examples}
    for split, limit in limits.items():
        images, labels = read_cifar(Path(data.path), split, num_labels)
        chosen = drawn_part(len(labels), limit)
        parts.append(ArrayImages(images[chosen], labels[chosen]))
    return parts[0], parts[1]


def collate_images(
    samples: Sequence[tuple[Any, int]], size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack, scale to [-1, 1] and resize to `size` × `size`."""
    images = torch.stack([_as_tensor(image) for image, _ in samples]) / 127.5 - 1.0
    if images.shape[-2:] != (size, size):
        images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return images, torch.tensor([label for _, label in samples])


def _as_tensor(image: Any) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        return image.float()
    import numpy as np

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
