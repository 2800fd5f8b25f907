"""From a run's configuration to its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shuffled_dpsgd.errors import InvalidArgumentError
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
    """Load data and model; refuses an empty data set or one smaller than the expected batch."""
    task = TASKS[config.task](config)
    size = len(task.train_data)
    if size < config.training.expected_batch_size:
        raise InvalidArgumentError(
            "training.expected_batch_size",
            expected=f"at most the number of training examples, {size}",
            got=config.training.expected_batch_size,
        )
    return task
