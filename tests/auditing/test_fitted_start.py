"""Initial weights that fit the records: lower losses, nothing else of the model changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shuffled_dpsgd.auditing.fitted_start import fit_to_records
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.audits.targets import cross_entropies


def records(count: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (count,), generator=generator)
    return [(torch.randn(6, generator=generator) + label, label) for label in labels]


def test_it_fits_the_trainable_weights_alone_and_puts_mode_and_gradients_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    model[0].bias.requires_grad_(False)
    frozen, data = model[0].bias.clone(), records()
    batch = [torch.stack(part) for part in zip(*data, strict=True)]
    before = cross_entropies(model, batch).mean().item()
    heard: list[int] = []
    last = fit_to_records(
        model, data, cross_entropies, num_steps=60, learning_rate=1e-2,
        on_progress=lambda done, _: heard.append(done),
    )  # fmt: skip
    after = cross_entropies(model, batch).mean().item()
    assert after < 0.7 * before
    assert last == pytest.approx(after, rel=0.5)
    assert heard == [*range(1, 61)]
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model[0].bias, frozen, rtol=0, atol=0)


def test_it_is_the_same_for_the_same_seed() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        fit_to_records(model, records(), cross_entropies, num_steps=5, seed=3)
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_no_steps_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_steps"):
        fit_to_records(nn.Linear(6, 3), records(), cross_entropies, num_steps=0)
