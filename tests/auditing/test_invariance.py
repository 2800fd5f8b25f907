"""A canary that no permutation moves: the shuffled release of a real run is the Gaussian pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from shuffled_dpsgd.accounting.bracket import STATEMENT
from shuffled_dpsgd.auditing.model_attacks import inner, normalised
from shuffled_dpsgd.auditing.probes import Prober
from shuffled_dpsgd.auditing.taps import trainable
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.permutation import apply_to_tensors, draw
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.card import write_card

SIGMA = 0.7


def invariant_direction(weights, names) -> dict[str, torch.Tensor]:
    """A unit vector constant over each of the named tensors: no permutation of axes moves it."""
    return normalised({name: torch.ones_like(weights[name]) for name in names})


def start(scope: str, preset: str, **changes: object):
    model = build_model(preset, num_labels=None if preset == "gpt2-tiny" else 10, device="cpu")
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=1000,
        expected_batch_size=20,
        num_steps=50,
        delta=1e-5,
        scope=scope,
        seed=0,
        **{"noise_multiplier": SIGMA, "batch_clip_norm": 1.0, **changes},
    )


@pytest.mark.parametrize("scope", ["paper", "full"])
@pytest.mark.parametrize("preset", ["vit-digits", "gpt2-tiny"])
def test_permutations_leave_it_alone_and_clips_do_too(scope: str, preset: str) -> None:
    """⟨v, release⟩ is the same before and after the shuffle: 1 with the canary, plus noise."""
    private = start(scope, preset)
    spec, weights = private.spec, trainable(private.model)
    moved = [name for name in weights if name in spec.moved_names]
    canary = invariant_direction(weights, moved)
    assert inner(canary, canary) == pytest.approx(1.0)
    shuffled = {name: tensor.clone() for name, tensor in canary.items()}
    apply_to_tensors(draw(spec, torch.Generator().manual_seed(1)), shuffled)
    assert all(torch.equal(shuffled[name], canary[name]) for name in canary)
    prober = Prober(private, seed=0)
    for planted in (None, canary):
        seen = prober.release(planted)
        before = inner(canary, seen.noisy)
        after = inner(canary, {name: seen.shuffled(name) for name in canary})
        assert after == pytest.approx(before, abs=1e-5)


def test_the_shuffled_release_follows_the_gaussian_pair() -> None:
    """120 releases a world: N(0, σ²) without the canary, N(1, σ²) with it."""
    private = start("full", "vit-digits")
    weights = trainable(private.model)
    moved = [name for name in weights if name in private.spec.moved_names]
    canary = invariant_direction(weights, moved)
    prober = Prober(private, seed=0)
    for planted, mean in ((None, 0.0), (canary, 1.0)):
        read = []
        for _ in range(120):
            seen = prober.release(planted)
            read.append(inner(canary, {name: seen.shuffled(name) for name in canary}))
        assert kstest((np.array(read) - mean) / SIGMA, "norm").pvalue > 1e-3


def test_the_card_says_that_nothing_less_can_be_certified() -> None:
    plan = start("paper", "vit-digits").plan
    card = write_card(plan, num_steps=plan.num_steps, shows_sums=True)
    assert STATEMENT in str(card)
    assert "in exact arithmetic" in STATEMENT
    assert card.to_json()["exactness"] == STATEMENT
    for change in ({"clip": "per-layer"}, {"adjacency": "replace-one"}, {"clip_quantile": 0.5}):
        other = write_card(replace(plan, **change), num_steps=plan.num_steps, shows_sums=True)
        assert STATEMENT not in str(other)
    assert write_card(plan, num_steps=plan.num_steps).exactness is None
    assert write_card(plan, num_steps=0, shows_sums=True).exactness is None


class SignedSGD(torch.optim.SGD):
    """Another update under a name that ends alike."""


@pytest.mark.filterwarnings("ignore:.*are bfloat16")
@pytest.mark.parametrize(
    ("optimizer", "changes", "dtype", "said"),
    [
        (torch.optim.SGD, {}, torch.float32, True),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, torch.float64, True),
        # Eight bits of weights do not tell of an update that is 256 times smaller.
        (torch.optim.SGD, {}, torch.bfloat16, False),
        (torch.optim.AdamW, {}, torch.float32, False),
        (SignedSGD, {}, torch.float32, False),
        # The weights never hear of the sums, or of one after the first.
        (torch.optim.SGD, {"lr": 0.0}, torch.float32, False),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 1.0}, torch.float32, False),
    ],
    ids=["sgd", "nesterov", "bfloat16", "adamw", "subclass", "no rate", "damped"],
)
def test_a_run_says_so_only_for_optimizers_it_is_proven_for(
    optimizer: type, changes: dict[str, Any], dtype: torch.dtype, said: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    model.to(dtype)
    private = make_private(
        model,
        optimizer(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **changes}),
        dataset_size=40,
        expected_batch_size=20,
        num_steps=1,
        delta=1e-3,
        noise_multiplier=SIGMA,
        seed=0,
    )
    data = torch.utils.data.TensorDataset(torch.randn(40, 4).to(dtype), torch.randint(2, (40,)))
    for x, y in private.batches(data, num_steps=1):
        private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        private.step()
    assert (private.card().exactness is not None) == said
