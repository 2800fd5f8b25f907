"""The learning rate's schedule: a warm-up that fits the run, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import start_private
from shuffled_dpsgd.tasks.advice import preview_shapes
from shuffled_dpsgd.tasks.config import OptimizerConfig, RunConfig
from shuffled_dpsgd.tasks.digits import default_config
from shuffled_dpsgd.tasks.start import build_scheduler


def in_epochs(warmup_steps: int) -> RunConfig:
    """Two epochs of five steps, if there are fifty records."""
    config = default_config()
    training = replace(config.training, epochs=2, num_steps=None, expected_batch_size=10)
    return replace(
        config,
        training=training,
        privacy=replace(config.privacy, shuffle="off"),
        optimizer=OptimizerConfig(warmup_steps=warmup_steps),
    )


def test_a_warm_up_may_fill_the_run_and_no_more() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    build_scheduler(optimizer, OptimizerConfig(warmup_steps=10), 10)
    with pytest.raises(InvalidArgumentError, match=r"at most 10, the number of steps of the run"):
        build_scheduler(optimizer, OptimizerConfig(warmup_steps=11), 10)


def test_steps_that_are_stated_are_compared_at_once() -> None:
    config = in_epochs(11)
    stated = replace(config.training, epochs=None, num_steps=11)
    assert replace(config, training=stated).optimizer.warmup_steps == 11
    with pytest.raises(InvalidArgumentError, match=r"^optimizer\.warmup_steps: .* at most 10"):
        replace(config, training=replace(stated, num_steps=10))


def test_steps_that_follow_from_the_data_are_compared_before_any_noise_is_calibrated() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^optimizer\.warmup_steps: .* at most 10"):
        start_private(in_epochs(11), nn.Linear(2, 2), dataset_size=50)
    start_private(in_epochs(11), nn.Linear(2, 2), dataset_size=51).close()


def test_a_preview_refuses_what_a_run_would() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^optimizer\.warmup_steps: .* at most 10"):
        preview_shapes(in_epochs(11), model="vit-digits", dataset_size=50)
