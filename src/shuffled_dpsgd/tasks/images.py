"""Image classification from CIFAR arrays or the hub, resized to what the model expects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import hub
from shuffled_dpsgd.tasks.classes import check_labels, stated_classes
from shuffled_dpsgd.tasks.classification import classification_task
from shuffled_dpsgd.tasks.config import DataConfig, RunConfig
from shuffled_dpsgd.tasks.folders import read_cifar
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.task import Task


class ArrayImages:
    """Images uint8 (N, H, W, 3) and labels as a map-style data set of (image, label)."""

    def __init__(self, images: Any, labels: Any) -> None:
        if len(images) != len(labels):
            raise InvalidArgumentError(
                "data.path", expected=f"{len(images)} labels", got=len(labels)
            )
        self._images = torch.as_tensor(images)
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index].permute(2, 0, 1), int(self.labels[index])


def build_task(config: RunConfig) -> Task:
    """Fine-tune an image classifier; pixels are scaled to [-1, 1], as the ViT models expect."""
    num_labels = stated_classes(config.data)
    train, heldout, labels = _read(config.data)
    check_labels(labels, num_labels)
    model = prepare_model(config.model, head="image", num_labels=num_labels, seed=config.init_seed)
    size = int(model.config.image_size)  # type: ignore[union-attr,arg-type]
    return classification_task(
        "image-classification",
        model,
        train,
        heldout,
        collate=lambda samples: collate_images(samples, size),
    )


def _read(data: DataConfig) -> tuple[Any, Any, list[int]]:
    """Training and held-out records, and the labels of both."""
    if data.format == "hub":
        train, heldout = hub.read_images(data)
        return train, heldout, [label for _, label in [*train, *heldout]]
    if data.format != "cifar":
        raise InvalidArgumentError(
            "data.format", expected="cifar or hub for this task", got=data.format
        )
    if data.path is None:
        raise InvalidArgumentError("data.path", expected="a folder or an .npz file", got=None)
    images, labels = read_cifar(Path(data.path), "train")
    test_images, test_labels = read_cifar(Path(data.path), "test")
    # Published test sets are sorted by class: a part must be drawn, not cut off.
    order = torch.randperm(len(test_labels), generator=torch.Generator().manual_seed(0))
    chosen = order[: data.max_heldout_examples].numpy()
    train = ArrayImages(images[: data.max_train_examples], labels[: data.max_train_examples])
    heldout = ArrayImages(test_images[chosen], test_labels[chosen])
    return train, heldout, [*train.labels.tolist(), *heldout.labels.tolist()]


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
