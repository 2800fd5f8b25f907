"""Re-alignment recovers the shuffle, exactly and under drift, for every scope and family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from shuffled_dpsgd.auditing.alignment import realign
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.permutation import apply_to_tensors, discover, draw
from shuffled_dpsgd_experiments.audits.axis import match_rows

PRESETS = {"vit-digits": 10, "bert-tiny": 3, "gpt2-tiny": None}


def shuffled(model: torch.nn.Module, scope: str, drift: float):
    spec = discover(model, scope=scope)
    generator = torch.Generator().manual_seed(7)
    known = {name: p.detach().clone() for name, p in model.named_parameters()}
    released = {
        name: w + drift * w.std(correction=0) * torch.randn(w.shape, generator=generator)
        for name, w in known.items()
    }
    truth = draw(spec, generator)
    apply_to_tensors(truth, released)
    return spec, known, released, truth


@pytest.mark.parametrize("drift", [0.0, 1.0])
@pytest.mark.parametrize("scope", ["paper", "full"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_shuffle_is_recovered(name: str, scope: str, drift: float) -> None:
    """Even when every weight has moved by its tensor's own standard deviation."""
    model = build_model(name, num_labels=PRESETS[name], device="cpu")
    spec, known, released, truth = shuffled(model, scope, drift)
    found = realign(spec, known, released)
    assert found.recovered(truth) == 1.0
    apply_to_tensors(truth.inverse(), released)
    assert all(torch.equal(found.tensors[key], released[key]) for key in known)


def test_unrelated_weights_are_not_recovered() -> None:
    """A negative control: against weights it never saw, matching finds nothing."""
    spec, _, released, truth = shuffled(
        build_model("vit-digits", num_labels=10, device="cpu"), "paper", 0.0
    )
    stranger = build_model("vit-digits", num_labels=10, seed=5, device="cpu")
    known = {name: p.detach() for name, p in stranger.named_parameters()}
    assert realign(spec, known, released).recovered(truth) < 0.3


@given(st.integers(2, 9), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_assignment_is_optimal(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    known, released = rng.standard_normal((2, size, 2))
    costs = ((known[:, None] - released[None]) ** 2).sum(axis=2)
    found = match_rows(known, released)
    assert sorted(found) == list(range(size))
    assert costs[np.arange(size), found].sum() == pytest.approx(
        costs[linear_sum_assignment(costs)].sum()
    )


def test_rows_are_matched_in_batches() -> None:
    rng = np.random.default_rng(0)
    known = rng.standard_normal((6, 4))
    order = np.stack([rng.permutation(6) for _ in range(5)])
    released = known[order] + 0.01 * rng.standard_normal((5, 6, 4))
    found = match_rows(known, released)
    np.testing.assert_array_equal(
        np.take_along_axis(order, found, axis=1), np.tile(np.arange(6), (5, 1))
    )


def test_a_full_width_axis_is_recovered_under_twice_its_own_drift() -> None:
    """3072 hidden units of a ViT-B block (weights in, bias, weights out), drift of two std."""
    rng = np.random.default_rng(0)
    known = rng.standard_normal((3072, 768 + 1 + 768))
    order = rng.permutation(3072)
    released = (known + 2.0 * rng.standard_normal(known.shape))[order]
    np.testing.assert_array_equal(order[match_rows(known, released)], np.arange(3072))
