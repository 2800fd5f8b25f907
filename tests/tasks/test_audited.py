"""Tasks as audits take them: the same run without privacy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shuffled_dpsgd.tasks import digits, parse_config
from shuffled_dpsgd.tasks.audited import target_of
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd_experiments.audits.targets import cross_entropies


def records(count: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (count,), generator=generator)
    return [(torch.randn(6, generator=generator) + label, label) for label in labels]


def task(model: nn.Module) -> Task:
    return Task(
        name="points",
        model=model,
        train_data=records(),
        losses=cross_entropies,
        evaluations={"test": lambda model: Evaluation(loss=0.0, score=0.0)},
        score_name="accuracy",
        fresh_model=lambda seed: model,
    )


@pytest.mark.parametrize("privacy", [{"epsilon": 2.0}, {"accounting": "paper", "epsilon": 1.0}])
def test_the_run_without_privacy_differs_in_privacy_alone(privacy: dict[str, object]) -> None:
    """Same weights, batches and steps; neither clip nor noise nor shuffle."""
    raw = digits.default_config().to_json()
    raw["privacy"] |= {"epsilon": 2.0, "batch_clip_norm": 1.0, "shuffle": "every-step", **privacy}
    raw["training"] = {"expected_batch_size": 8, "num_steps": 3, "device": "cpu"}
    config = parse_config(raw)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    target = target_of(config, task(model))
    private, plain = target.start(24), target.start_plain(24)
    assert not plain.plan.bounds_samples
    assert [block.noise_multiplier for block in plain.plan.blocks] == [0.0]
    assert not plain.plan.permutes
    assert plain.plan.num_steps == private.plan.num_steps
    assert plain.plan.uncertifiable
    for step in range(3):
        assert torch.equal(plain.sampler.indices(step), private.sampler.indices(step))
    for ours, theirs in zip(plain.model.parameters(), private.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
