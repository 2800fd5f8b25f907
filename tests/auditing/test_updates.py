"""A step of the run's optimizer, taken again and again from one place, and read back."""

from __future__ import annotations

import pytest
import torch

from shuffled_dpsgd.auditing.updates import RewoundOptimizer
from shuffled_dpsgd.training import make_private

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def trained(name: str, *, num_steps: int):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model = model.double()
    records = torch.utils.data.TensorDataset(
        torch.randn(60, 6, dtype=torch.float64), torch.randint(3, (60,))
    )
    private = make_private(
        model,
        OPTIMIZERS[name](model.parameters()),
        dataset_size=60,
        expected_batch_size=20,
        num_steps=100,
        noise_multiplier=1.0,
        delta=1e-4,
        clip_norm=1.0,
        shuffle="off",
        seed=0,
    )
    for x, y in private.batches(records, num_steps=num_steps):
        losses = torch.nn.functional.cross_entropy(private.model(x), y, reduction="none")
        private.backward(losses)
        private.step()
    private.close()
    return private


def a_gradient(private, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) / 20
        for name, p in private.model.named_parameters()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gradient_is_read_back_from_the_weights(name: str) -> None:
    private = trained(name, num_steps=30)
    rewound = RewoundOptimizer(private)
    for seed in (1, 2):
        gradient = a_gradient(private, seed)
        found = rewound.read_back(rewound.step(gradient))
        for key, tensor in gradient.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_run_and_leave_no_trace(name: str) -> None:
    private = trained(name, num_steps=3)
    rewound, gradient = RewoundOptimizer(private), a_gradient(private, 1)
    rewound.step(a_gradient(private, 2))
    again = rewound.step(gradient)
    for key, parameter in private.model.named_parameters():
        parameter.grad = gradient[key]
    private.optimizer.step()
    for key, parameter in private.model.named_parameters():
        torch.testing.assert_close(again[key], parameter.detach())


def test_the_first_step_of_adam_shows_signs() -> None:
    private = trained("adamw", num_steps=0)
    rewound, gradient = RewoundOptimizer(private), a_gradient(private, 1)
    found = rewound.read_back(rewound.step(gradient))
    assert all(torch.equal(found[key].sign(), gradient[key].sign()) for key in gradient)
