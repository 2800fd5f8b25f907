"""What somebody who comes from another library meets first: names, claims, loaders, BatchNorm."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, default_collate

from shuffled_dpsgd import fix_model
from shuffled_dpsgd.accounting import certified_claim, claim_together
from shuffled_dpsgd.core.events import SampledGaussian
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.runtime import notices
from shuffled_dpsgd.training import LoopSettings, PrivateTraining, make_private, train
from training.cases import RECORDS, classify, make_mlp, vectors

SETTINGS: dict[str, Any] = {
    "dataset_size": RECORDS,
    "expected_batch_size": 8,
    "num_steps": 4,
    "noise_multiplier": 1.0,
    "delta": 1e-3,
}


def started(**changes: Any) -> PrivateTraining:
    model = make_mlp()
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **(SETTINGS | changes))


def take(private: PrivateTraining, data: Any, **options: Any) -> None:
    for batch in private.batches(data, **options):
        private.backward(classify(private.model, batch))
        private.step()


OPACUS = {
    ("target_epsilon", "target_delta", "max_grad_norm"): "target_epsilon is epsilon; target_delta "
    "is delta; max_grad_norm is clip_norm",
    ("module", "data_loader"): "module is model, the first argument; data_loader is dataset_size",
    ("clipnorm",): "clipnorm is clip_norm",
}


@pytest.mark.parametrize(("wrong", "answer"), OPACUS.items(), ids=str)
def test_other_libraries_keywords_are_answered(wrong: tuple[str, ...], answer: str) -> None:
    with pytest.raises(InvalidArgumentError, match=answer):
        make_private(**dict.fromkeys(wrong, 1.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'quux'"):
        started(quux=1)


def test_epsilon_is_a_claim_that_shows_its_kind() -> None:
    private = started()
    assert private.epsilon.epsilon == 0.0
    take(private, vectors(), num_steps=2)
    exact = {"noise_multiplier": 1.0, "sampling_prob": 0.2}
    whole = certified_claim(**exact, num_steps=4, delta=1e-3)
    assert private.epsilon.epsilon == whole.epsilon
    assert str(private.epsilon) == f"ε = {whole.epsilon:.4g} (proven) at δ = 0.001 by PLD"
    assert f"{private.epsilon:.2f}" == f"{whole.epsilon:.2f} (proven)"
    # After two of four steps, as if two had been planned, and at another δ.
    so_far = private.get_epsilon(1e-5)
    assert so_far.epsilon == certified_claim(**exact, num_steps=2, delta=1e-5).epsilon
    assert "fixed in advance" in so_far.assumptions[-1]
    for shown in (str(so_far), f"{so_far:.2f}", so_far.describe()):
        assert "(proven only if this number of steps was fixed in advance)" in shown
    take(private, vectors())
    assert private.get_epsilon().epsilon == private.epsilon.epsilon == whole.epsilon
    assert not any("fixed in advance" in each for each in private.get_epsilon().assumptions)


def test_where_nothing_is_certified_epsilon_is_infinite_and_says_why() -> None:
    private = started(noise_multiplier=0.0)
    assert private.epsilon.epsilon == private.get_epsilon(1e-6).epsilon == math.inf
    assert "some parameters receive no noise" in str(private.epsilon)


def test_a_data_loader_may_be_handed_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    collated = []

    def collate(samples: list[Any]) -> Any:
        collated.append(len(samples))
        return default_collate(samples)

    sampler = WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    loader = DataLoader(vectors(), batch_size=3, sampler=sampler, collate_fn=collate)
    private, plain = started(seed=1), started(seed=1)
    with caplog.at_level(logging.WARNING, "shuffled_dpsgd"):
        take(private, loader, num_steps=2)
        take(private, loader)
    said = [text for text in caplog.messages if "DataLoader" in text]
    assert len(said) == 1
    assert "WeightedRandomSampler, batch_size=3" in said[0]
    assert collated
    assert max(collated) > 3
    take(plain, vectors())
    for one, other in zip(private.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    again = started(seed=1)
    train(again, loader, classify, settings=LoopSettings())
    for one, other in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(vectors())


REFUSED = {
    "whole batches": lambda: DataLoader(vectors(), batch_size=None),
    "worker_init_fn": lambda: DataLoader(vectors(), worker_init_fn=print),
    "map-style": lambda: DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_loaders_that_cannot_be_taken_over_are_refused(kind: str) -> None:
    named = "single records" if kind != "map-style" else "map-style"
    with pytest.raises(InvalidArgumentError, match=named):
        started().batches(REFUSED[kind]())


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.Sequential(nn.Conv2d(16, 6, 3), nn.BatchNorm2d(6, affine=False)),
        nn.Flatten(),
        nn.Linear(96, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )


def test_batch_norm_is_refused_until_fix_model_replaces_it() -> None:
    model = with_batch_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModuleError, match="fix_model"):
        make_private(model, optimizer, **SETTINGS)
    with pytest.warns(UserWarning, match=r"3 BatchNorm layers became GroupNorm.*: 1, 2\.1, 5"):
        assert fix_model(model) is model
    found = {path: m for path, m in model.named_modules() if isinstance(m, nn.GroupNorm)}
    assert {path: m.num_groups for path, m in found.items()} == {"1": 4, "2.1": 1, "5": 1}
    assert found["2.1"].weight is None
    # The optimizer from before still holds every parameter.
    private = make_private(model, optimizer, **SETTINGS)
    images = torch.randn(RECORDS, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(images, torch.arange(RECORDS) % 3)
    for x, y in private.batches(data):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        private.step()
    assert private.ledger.spent == 4


def test_what_replaces_batch_norm_does_not_lose_its_input() -> None:
    """One group for each channel would map every row of a flat layer to the same."""
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="the model"):
        fixed = fix_model(nn.BatchNorm1d(8))
    torch.testing.assert_close(fixed(rows), F.layer_norm(rows, (8,)))
    shared = nn.BatchNorm2d(8)
    twice = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    with pytest.warns(UserWarning, match="1 BatchNorm"):
        fix_model(twice)
    assert twice["a"] is twice["b"][0]  # type: ignore[index]
    assert isinstance(twice["a"], nn.GroupNorm)
    with pytest.raises(InvalidArgumentError, match=r"BatchNorm1d\(1\)"):
        fix_model(nn.Sequential(nn.BatchNorm1d(1)))


def test_noise_and_clips_in_stages_are_priced_together() -> None:
    """A schedule of noise and clips: runs on one model, one after the other."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stages = ({"noise_multiplier": 2.0, "clip_norm": 1.0, "num_steps": 3},
              {"noise_multiplier": 1.0, "clip_norm": 0.5, "num_steps": 2})  # fmt: skip
    for stage in stages:
        private = make_private(model, optimizer, **(SETTINGS | stage))
        take(private, vectors())
        private.close()
    spent = [
        SampledGaussian(
            noise_multiplier=stage["noise_multiplier"],
            sampling_prob=0.2,
            num_steps=int(stage["num_steps"]),
        )
        for stage in stages
    ]
    assert private.epsilon.epsilon == claim_together(spent, 1e-3).epsilon
    assert private.epsilon.epsilon > certified_claim(**spent[1].to_json(), delta=1e-3).epsilon
