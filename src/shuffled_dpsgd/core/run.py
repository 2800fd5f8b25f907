"""A complete private trainer out of the core alone: slow, correct, and the meaning of the rest.

Algorithm 1 with its two noise blocks and its batch clip: Poisson batches, one sample at a time by
plain autograd, the door, the user's optimizer. The shuffle is post-processing and comes in as
`after_update`. A fast run with the same seed makes the same releases to rounding; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.core.card import CertifiedCard, write_card
from shuffled_dpsgd.core.clip import PlainClipping
from shuffled_dpsgd.core.ledger import Ledger
from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.noise import GaussianNoise
from shuffled_dpsgd.core.plan import NoiseBlock, PrivacyPlan
from shuffled_dpsgd.core.referee import Referee
from shuffled_dpsgd.core.release import Door
from shuffled_dpsgd.core.sampler import PoissonSampler, some_of
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.errors import require


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Sequence[Any],
    plan: PrivacyPlan,
    *,
    ledger_path: str | Path | None = None,
    after_update: Callable[[int], None] = lambda step: None,
) -> CertifiedCard:
    """Train `model` on `data` under `plan` and return the card.

    `loss(model, record)` is the scalar loss of one record, which nothing else may influence.
    `after_update(step)` is called after every update; it sees no record. Under a plan of several
    records per unit, `data` has for every unit the sequence of its records.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(2, 1)
    >>> data = [(torch.randn(2), torch.randn(1)) for _ in range(40)]
    >>> plan = plain_plan(model, dataset_size=40, expected_batch_size=4, num_steps=3,
    ...                   delta=1e-3, clip_norm=1.0, noise_multiplier=1.0)
    >>> error = lambda model, record: (model(record[0]) - record[1]).square().sum()
    >>> card = train(model, torch.optim.SGD(model.parameters(), lr=0.1), error, data, plan)
    >>> card.certified.describe()
    'ε = 0.982 (proven) at δ = 0.001 by PLD'
    """
    size = plan.dataset_size
    require(len(data) == size, "data", f"{size} records, or units", len(data))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    streams = RandomStreams(plan.seed)
    sampler = PoissonSampler(
        dataset_size=plan.dataset_size,
        sampling_prob=plan.sampling_prob,
        streams=streams,
        largest_batch=plan.largest_batch,
        bands=plan.bands,
    )
    engine = PlainClipping(model, clip_norm=plan.clip_norm, clip=plan.clip)
    referee = Referee(model, engine, clip_norm=plan.clip_norm, clip=plan.clip)
    mechanism = ShuffledGaussianMechanism(plan, GaussianNoise())
    ledger = Ledger(
        plan_fingerprint=plan.fingerprint(), max_releases=plan.num_steps, path=ledger_path
    )

    def update(gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in trainable.items():
            parameter.grad = gradients[name].to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    door = Door(names=tuple(trainable), plan=plan, streams=streams, update=update)
    for step in range(plan.num_steps):
        drawn = sampler.indices(step).tolist()
        engine.reset()
        for index in drawn:
            own, most = data[index], plan.records_per_unit
            if most is not None:
                key = streams.key("sampling", step, 1 + index)
                losses = [loss(model, own[i]) for i in some_of(range(len(own)), most, key)]
            else:
                losses = [loss(model, own)]
            engine.add(torch.stack(losses).mean())
        door.inspect(engine, referee, step=step, drawn=len(drawn))
        door.release(
            step=step, count=len(drawn), referee=referee, ledger=ledger, mechanism=mechanism
        )
        after_update(step)
    return write_card(plan, CertifiedCard, num_steps=ledger.spent, checks=referee.checks)


def plain_plan(model: nn.Module, *, noise_multiplier: float, **settings: Any) -> PrivacyPlan:
    """The plan of DP-SGD: one block, one noise multiplier, no batch clip."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    block = NoiseBlock(
        name="rest",
        parameters=tuple(sizes),
        dimension=sum(sizes.values()),
        noise_multiplier=noise_multiplier,
    )
    return PrivacyPlan(blocks=(block,), **settings)
