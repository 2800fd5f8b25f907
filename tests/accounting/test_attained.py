"""Who attains the certified ε, what the shuffle cannot hide, and what it does hide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import ks_2samp, kstest
from torch import nn

from shuffled_dpsgd.permutation import apply, discover, draw

CLIP = 0.25
NOISE = 0.7


class BlankImageClassifier(nn.Module):
    """Hidden units without a bias, as in many networks: a blank image excites none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(x)))


def clipped_gradient(model: nn.Module, x: torch.Tensor, label: int) -> dict[str, torch.Tensor]:
    loss = nn.functional.cross_entropy(model(x[None]), torch.tensor([label]))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    return {n: g * min(1.0, CLIP / norm) for n, g in zip(names, gradients, strict=True)}


def test_a_blank_image_attains_the_certified_epsilon() -> None:
    """Its clipped gradient has norm c and lies on the class bias, which no permutation moves.

    So whoever knows the record reads, in every shuffled step, the Gaussian pair of the accountant.
    """
    torch.manual_seed(0)
    model, blank = BlankImageClassifier(), torch.zeros(64)
    spec = discover(model)
    assert "hidden.weight" in spec.moved_names
    assert "head.bias" not in spec.moved_names
    seen: dict[bool, list[float]] = {True: [], False: []}
    for step in range(400):
        canary = clipped_gradient(model, blank, label=3)
        assert math.sqrt(float(canary["head.bias"].square().sum())) == pytest.approx(CLIP, rel=1e-6)
        assert all(not g.any() for name, g in canary.items() if name != "head.bias")
        joins = bool(step % 2)
        noisy = {
            name: NOISE * CLIP * torch.randn_like(g) + (g if joins else 0.0)
            for name, g in canary.items()
        }
        direction = canary["head.bias"] / CLIP
        with torch.no_grad():
            before = model.head.bias.clone()
            for name, parameter in model.named_parameters():
                parameter -= 0.05 * noisy[name]
        apply(draw(spec, torch.Generator().manual_seed(step)), model)
        released = (before - model.head.bias.detach()) / 0.05
        seen[joins].append(float(released @ direction) / CLIP)
    for joins, mean in ((False, 0.0), (True, 1.0)):
        assert kstest((np.array(seen[joins]) - mean) / NOISE, "norm").pvalue > 1e-3


SLOTS = 3
FIXED = np.array([1.0, 1.0, 1.0, 2.0])  # constant on the permuted slots: P·v = v
MOVED = np.array([1.0, -1.0, 0.0, 0.0])


def slopes(u: np.ndarray) -> np.ndarray:
    """φ' of two records with non-convex losses of ⟨v, w⟩, clipped to one over the norm of v."""
    bound = 1.0 / math.sqrt(7.0)
    return np.clip(2.0 * np.sin(3.0 * u), -bound, bound) + np.clip(u - 0.4, -bound, bound)


def train(
    v: np.ndarray, *, shuffled: bool, adam: bool, runs: int, seed: int, steps: int = 12
) -> tuple[np.ndarray, np.ndarray]:
    """(⟨v, w_T⟩, ⟨v, w_T⟩ with the same noise in the un-permuted frame), over many runs."""
    rng = np.random.default_rng(seed)
    w = np.tile(np.array([0.3, -0.2, 0.1, 0.05]), (runs, 1))
    plain = w.copy()
    first, second = np.zeros_like(w), np.zeros_like(w)
    plain_first, plain_second = first.copy(), second.copy()
    orders = np.tile(np.arange(4), (runs, 1))
    for step in range(1, steps + 1):
        noise = rng.standard_normal(w.shape) * 0.3
        unpermuted = np.empty_like(noise)
        np.put_along_axis(unpermuted, orders, noise, axis=1)
        updates = []
        for weights, z, m, s in (
            (w, noise, first, second),
            (plain, unpermuted, plain_first, plain_second),
        ):
            gradient = slopes(weights @ v)[:, None] * v + z
            m += 0.1 * (gradient - m)
            s += 0.01 * (gradient**2 - s)
            corrected = m / (1.0 - 0.9**step) / (np.sqrt(s / (1.0 - 0.99**step)) + 1e-8)
            updates.append(0.1 * (corrected if adam else gradient))
        w, plain = w - updates[0], plain - updates[1]
        if shuffled:
            drawn = np.tile(np.arange(4), (runs, 1))
            drawn[:, :SLOTS] = rng.permuted(drawn[:, :SLOTS], axis=1)
            w, first, second, orders = (
                np.take_along_axis(each, drawn, axis=1) for each in (w, first, second, orders)
            )
    return w @ v, plain @ v


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_on_fixed_points_the_shuffle_changes_no_law(adam: bool) -> None:
    """The theorem: run by run with the same noise, and in law with noise of its own."""
    shuffled, same_noise = train(FIXED, shuffled=True, adam=adam, runs=4000, seed=1)
    assert shuffled == pytest.approx(same_noise, abs=1e-9)
    other, _ = train(FIXED, shuffled=False, adam=adam, runs=4000, seed=2)
    assert ks_2samp(shuffled, other).pvalue > 1e-3


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_off_the_fixed_points_it_does(adam: bool) -> None:
    """The same comparison tells the laws apart where v is moved, so it could have failed above."""
    shuffled, _ = train(MOVED, shuffled=True, adam=adam, runs=4000, seed=1)
    other, _ = train(MOVED, shuffled=False, adam=adam, runs=4000, seed=2)
    assert ks_2samp(shuffled, other).pvalue < 1e-6


@pytest.mark.parametrize(("slots", "mu"), [(16, 1.0), (256, 2.0)])
def test_one_of_many_slots_is_hidden_among_them(slots: int, mu: float) -> None:
    """χ² of a spike in an unknown slot against none is (e^{μ²} − 1)/K: small, and not DP."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400_000 // slots, slots))
    ratio = np.exp(mu * x - 0.5 * mu**2).mean(axis=1)
    closed = (math.exp(mu**2) - 1.0) / slots
    assert np.var(ratio) == pytest.approx(closed, rel=0.35)
    # Constant on all slots, with the same norm, nothing is hidden: χ² is that of the Gaussian.
    ratio = np.exp(x @ np.full(slots, mu / math.sqrt(slots)) - 0.5 * mu**2)
    assert np.var(ratio) > 3.0 * closed


def test_matching_undoes_the_shuffle_until_the_weights_have_drifted_far() -> None:
    """256 units with 64 weights each, drifted by a multiple of their own standard deviation."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal((256, 64))
    shares = {}
    for drift in (1.0, 3.0, 10.0):
        order = rng.permutation(256)
        moved = (start + drift * rng.standard_normal(start.shape))[order]
        found = linear_sum_assignment(-start @ moved.T)[1]
        shares[drift] = float((order[found] == np.arange(256)).mean())
    assert shares[1.0] == 1.0
    assert shares[10.0] < 0.1 < shares[3.0]
