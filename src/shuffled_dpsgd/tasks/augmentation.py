"""Several views of an image, whose gradients are averaged before clipping (De et al., 2022).

The views of a record are K rows of the batch; its loss is the mean over them. So its gradient is
one, clipped once, and nothing about the accounting changes.

Shapes: B records, K views, C channels, H × W pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# The share of a side by which an image is shifted at most: four pixels of 32.
_SHIFT = 8


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
    """The forward of an image classifier that also takes images (B, K, C, H, W).

    For these it returns logits (B, K, classes). It stands in the instance's dictionary, so that
    the model keeps its class and the names of its parameters.
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
