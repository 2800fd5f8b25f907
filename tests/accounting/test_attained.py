"""Who attains the certified ε, what the shuffle cannot hide, and what it does hide."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import ks_2samp, kstest, mannwhitneyu
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd import make_private
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


def test_a_whole_run_releases_the_gaussian_pair_of_a_blank_image() -> None:
    """Through `make_private`, every weight shuffled and released, momentum and all.

    The other record weighs nothing. Whoever knows the blank image takes the momentum back off the
    class bias of successive weights and reads N(1, σ²) where it was drawn, else N(0, σ²).
    """
    torch.manual_seed(0)
    model, steps, rate, momentum = BlankImageClassifier(), 160, 0.01, 0.5
    data = TensorDataset(torch.zeros(2, 64), torch.tensor([3, 5]), torch.tensor([1.0, 0.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    private = make_private(
        model, optimizer, dataset_size=2, expected_batch_size=1, num_steps=steps, delta=1e-5,
        noise_multiplier=NOISE, clip_norm=CLIP, shuffle="every-step", scope="full", seed=4,
    )  # fmt: skip
    moved = [name for name in dict(model.named_parameters()) if name in private.spec.moved_names]
    assert moved == ["hidden.weight", "head.weight"]
    biases = [model.head.bias.detach().clone()]
    private.on_update(lambda: biases.append(model.head.bias.detach().clone()))
    drawn = [0 in private.sampler.indices(step).tolist() for step in range(steps)]
    for x, y, weight in private.batches(data):
        private.backward(weight * nn.functional.cross_entropy(model(x), y, reduction="none"))
        private.step()
    assert private.card().exactness is not None
    assert len(biases) == steps + 1
    seen: dict[bool, list[float]] = {True: [], False: []}
    velocity = torch.zeros(10)
    for joins, (before, after) in zip(drawn, pairwise(biases), strict=True):
        released = (before - after) / rate - momentum * velocity
        velocity = (before - after) / rate
        canary = before.softmax(0) - nn.functional.one_hot(torch.tensor(3), 10)
        seen[joins].append(float(released @ canary / canary.norm()) / CLIP)
    for joins, mean in ((False, 0.0), (True, 1.0)):
        assert len(seen[joins]) > steps / 3
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


def last_weights(v: np.ndarray, *, shuffled: bool, joins: bool, runs: int, seed: int) -> np.ndarray:
    """SGD with momentum and weight decay from secret Gaussian weights; one record may be missing.

    Slots move with their momentum after every step.
    """
    rng = np.random.default_rng(seed)
    w, velocity = 0.5 * rng.standard_normal((runs, 4)), np.zeros((runs, 4))
    for _ in range(6):
        u = w @ v
        bound = 1.0 / math.sqrt(v @ v)
        slope = np.clip(2.0 * np.sin(3.0 * u), -bound, bound)
        slope += joins * np.clip(2.0 - u, -bound, bound)
        gradient = slope[:, None] * v + 0.5 * rng.standard_normal(w.shape)
        velocity = 0.5 * velocity + gradient + 0.01 * w
        w = w - 0.3 * velocity
        if shuffled:
            drawn = np.tile(np.arange(4), (runs, 1))
            drawn[:, :SLOTS] = rng.permuted(drawn[:, :SLOTS], axis=1)
            w, velocity = (np.take_along_axis(each, drawn, axis=1) for each in (w, velocity))
    return w


def told_apart(v: np.ndarray, *, shuffled: bool, along: bool = False) -> float:
    """Held-out area under the ROC curve of "was the record there" from the last weights.

    By regression on the powers of ⟨v, w⟩ and, unless it reads `along` v alone, on all squares and
    products of weights.
    """
    rows, labels = [], []
    for joins in (False, True):
        w = last_weights(v, shuffled=shuffled, joins=joins, runs=20_000, seed=3 + joins)
        u = w @ v
        read = [u**power for power in range(6)]
        if not along:
            read += [w[:, i] * w[:, j] for i in range(4) for j in range(i + 1)] + list(w.T[:3])
        rows.append(np.stack(read, axis=1))
        labels.append(np.full(len(w), float(joins)))
    x, y = np.concatenate(rows), np.concatenate(labels)
    kept = np.arange(len(y)) % 2 == 0
    guess = x[~kept] @ np.linalg.lstsq(x[kept], y[kept], rcond=None)[0]
    present, absent = guess[y[~kept] == 1.0], guess[y[~kept] == 0.0]
    return float(mannwhitneyu(present, absent).statistic) / (len(present) * len(absent))


def test_for_losses_on_fixed_points_the_shuffle_hides_nothing() -> None:
    """The last weights alone, a secret start, momentum: as telling as without, and by ⟨v, w⟩ alone.

    Elsewhere the same shuffle does hide; areas of 20,000 held-out runs err by about 0.003.
    """
    plain = told_apart(FIXED, shuffled=False)
    assert plain > 0.6
    assert told_apart(FIXED, shuffled=True) == pytest.approx(plain, abs=0.01)
    assert told_apart(FIXED, shuffled=True, along=True) == pytest.approx(plain, abs=0.01)
    assert told_apart(MOVED, shuffled=True) < told_apart(MOVED, shuffled=False) - 0.05


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
