"""Algorithm 1: without noise and clip it is plain SGD; with them, each line does what it says."""

from __future__ import annotations

import math

import pytest
import torch

from shuffled_dpsgd.training import make_private
from training.cases import FixedSampler, bert_case, distance, mlp_case, run, weights

BATCHES = ([0, 3, 5, 9], [1], [2, 4, 6, 7, 8, 10, 11], [])
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_noise_and_infinite_clip_is_the_plain_optimizer(name: str) -> None:
    case = mlp_case(torch.float64)
    model = case.make()
    private = make_private(
        model,
        OPTIMIZERS[name](model.parameters()),
        dataset_size=40,
        expected_batch_size=4,
        num_steps=8,
        delta=1e-3,
        noise_multiplier=0.0,
        clip_norm=math.inf,
        shuffle="off",
        seed=0,
        physical_batch_size=3,
    )
    private.sampler = FixedSampler(*BATCHES)
    run(private, case)

    plain = case.make()
    optimizer = OPTIMIZERS[name](plain.parameters())
    inputs, labels = case.data.tensors
    for step in range(8):
        rows = BATCHES[step % 4]
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if rows:
            loss = torch.nn.functional.cross_entropy(
                plain(inputs[rows]), labels[rows], reduction="sum"
            )
            (loss / 4).backward()
        optimizer.step()
    assert distance(weights(model), weights(plain)) < 1e-13


def test_division_is_by_the_expected_batch_whatever_was_drawn() -> None:
    steps = []
    for batch in ([0], [0, 1, 2, 3]):
        case = mlp_case(torch.float64)
        model = case.make()
        before = weights(model)
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            dataset_size=40,
            expected_batch_size=10,
            num_steps=1,
            delta=1e-3,
            noise_multiplier=0.0,
            clip_norm=1e-3,
            shuffle="off",
            seed=0,
        )
        private.sampler = FixedSampler(batch)
        run(private, case)
        after = weights(model)
        squares = sum(float(((after[n] - before[n]) ** 2).sum()) for n in after)
        steps.append(math.sqrt(squares))
    assert steps[0] == pytest.approx(1e-3 / 10, rel=1e-5)
    assert steps[1] <= 4 * 1e-3 / 10 * (1 + 1e-6)


def test_batch_clip_bounds_the_shuffled_block_as_a_whole_and_nothing_else() -> None:
    case = bert_case(torch.float64)
    model = case.make()
    before = weights(model)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dataset_size=40,
        expected_batch_size=20,
        num_steps=1,
        delta=1e-3,
        noise_multiplier=0.0,
        clip_norm=1.0,
        batch_clip_norm=0.25,
        shuffle="at-release",
        seed=0,
    )
    private.sampler = FixedSampler(list(range(20)))
    run(private, case)
    after = weights(model)
    shuffled, rest = private.plan.blocks
    assert (shuffled.name, rest.name) == ("shuffled", "rest")
    norms = {
        block.name: 20
        * math.sqrt(sum(float(((after[n] - before[n]) ** 2).sum()) for n in block.parameters))
        for block in (shuffled, rest)
    }
    assert norms["shuffled"] == pytest.approx(0.25, rel=1e-9)
    release = private.last_metrics.release  # type: ignore[union-attr]
    clipped, free = release.blocks
    assert clipped.batch_clip_factor < 1.0
    assert free.batch_clip_factor == 1.0
    assert norms["rest"] == pytest.approx(free.sum_norm, rel=1e-9)
    assert set(shuffled.parameters) | set(rest.parameters) == set(before)


def test_fallback_is_plain_dpsgd_at_the_larger_noise_without_batch_clip_or_shuffle() -> None:
    case = bert_case()
    model = case.make()
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=40,
        expected_batch_size=8,
        num_steps=2,
        delta=1e-3,
        noise_multiplier=2.0,
        unshuffled_noise_multiplier=1.5,
        accounting="paper",
        batch_clip_norm=1.0,
        seed=0,
    )
    plan = private.plan
    assert plan.falls_back
    assert not plan.permutes
    assert {block.noise_multiplier for block in plan.blocks} == {1.5}
    assert {block.batch_clip_norm for block in plan.blocks} == {None}
    run(private, case)
    assert "fell back" in str(private.card())
