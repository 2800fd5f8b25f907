"""Tasks as audits take them: fitted initial weights, and the same run without privacy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shuffled_dpsgd.tasks import digits, parse_config
from shuffled_dpsgd.tasks.audited import fit_to_records, target_of
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


def test_it_fits_the_trainable_weights_alone_and_puts_mode_and_gradients_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)).eval()
    model[0].bias.requires_grad_(False)
    frozen, aimed = model[0].bias.clone(), task(model)
    batch = [torch.stack(part) for part in zip(*aimed.train_data, strict=True)]
    before = cross_entropies(model, batch).mean().item()
    fit_to_records(aimed, num_steps=120, seed=0)
    assert cross_entropies(model, batch).mean().item() < 0.7 * before
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model[0].bias, frozen, rtol=0, atol=0)


def test_it_is_the_same_for_the_same_seed() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        fit_to_records(task(model), num_steps=5, seed=3)
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=0)


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
