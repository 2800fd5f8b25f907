"""From a run's configuration to its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shuffled_dpsgd.tasks import digits, images, text
from shuffled_dpsgd.tasks.config import RunConfig, TaskName
from shuffled_dpsgd.tasks.task import Task

TASKS: Mapping[TaskName, Callable[[RunConfig], Task]] = {
    "digits": digits.build_task,
    "image-classification": images.build_task,
    "text-classification": text.build_classification,
    "causal-lm": text.build_causal_lm,
}


def build_task(config: RunConfig) -> Task:
    """Load data and model; data that cannot be used are refused before the model is loaded."""
    return TASKS[config.task](config)
