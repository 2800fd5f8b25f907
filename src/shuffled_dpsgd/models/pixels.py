"""A linear classifier of raw pixels, or a small MLP: the floor that a larger model must beat.

Under much noise fewer weights learn more. The classes are registered with transformers, so that
`AutoModelForImageClassification.from_pretrained` reads a saved one once this module is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import ImageClassifierOutput


class PixelsConfig(PretrainedConfig):
    """The shape of an image, and the width of the hidden layer; 0 for none."""

    model_type = "pixels"

    def __init__(
        self, image_size: int = 32, num_channels: int = 3, hidden_size: int = 0, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.image_size = image_size
        self.num_channels = num_channels
        self.hidden_size = hidden_size


class PixelsForImageClassification(PreTrainedModel):
    """Logits from pixels (B, C, H, W), all of them at once."""

    config_class = PixelsConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PixelsConfig) -> None:
        super().__init__(config)
        width = config.num_channels * config.image_size**2
        self.hidden: nn.Module = nn.Identity()
        if config.hidden_size:
            self.hidden = nn.Sequential(nn.Linear(width, config.hidden_size), nn.ReLU())
        self.classifier = nn.Linear(config.hidden_size or width, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """Logits of shape (B, classes)."""
        return ImageClassifierOutput(logits=self.classifier(self.hidden(pixel_values.flatten(1))))


AutoConfig.register("pixels", PixelsConfig, exist_ok=True)
AutoModelForImageClassification.register(PixelsConfig, PixelsForImageClassification, exist_ok=True)
