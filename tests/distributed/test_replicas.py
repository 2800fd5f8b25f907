"""Ranks with the whole model each: the result does not depend on how many there are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from distributed.equality import NAMES, assert_all_same
from distributed.launching import Launcher
from shuffled_dpsgd.training import GaussianNoise

HERE = "distributed.replicas"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_ranks_changes_nothing(
    launcher: Launcher, alone: dict[str, Any], ranks: int
) -> None:
    """Empty, uneven and full batches, batch clip, noise, shuffle: float64, to 1e-9."""
    assert_all_same(launcher.run(HERE, "several", ranks=ranks, names=NAMES), alone)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_draws_its_share_of_the_same_noise(launcher: Launcher, ranks: int) -> None:
    """Bit for bit what one process draws; the right spread; nothing in common between ranks."""
    sizes = {"a": 70_001, "wide": 30_007, "b": 3, "c": 600_000}
    found = launcher.run(HERE, "shares_of_noise", ranks=ranks, sizes=sizes)
    whole = {
        name: torch.zeros(size, dtype=torch.float64 if name == "wide" else torch.float32)
        for name, size in sizes.items()
    }
    GaussianNoise().add_(whole, dict.fromkeys(sizes, 2.0), key=bytes(32))
    for name, expected in whole.items():
        assert all(torch.equal(one[name], expected) for one in found)
    shares = [torch.cat([one[f"share of {name}"] for name in ("a", "b", "c")]) for one in found]
    assert sum(share.numel() for share in shares) == 670_004
    assert max(s.numel() for s in shares) - min(s.numel() for s in shares) < ranks
    length = min(share.numel() for share in shares)
    for share in shares:
        assert float(share.std()) == pytest.approx(2.0, rel=0.01)
    correlations = torch.corrcoef(torch.stack([share[:length] for share in shares]))
    between = correlations - torch.eye(ranks)
    assert float(between.abs().max()) < 5 / math.sqrt(length)


def test_lengths_are_asked_for_once_in_a_launch(launcher: Launcher) -> None:
    """By rank 0; all ranks divide batches by them."""
    one, two = launcher.run(HERE, "lengths_asked_for")
    assert (one["asked"], two["asked"]) == (40, 0)
    assert one["parts"] == two["parts"]
    lengths = [index % 7 for part in one["parts"] for index in part]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 7


def test_a_secure_run_draws_alike_on_all_ranks(launcher: Launcher) -> None:
    one, two = launcher.run(HERE, "secure_steps")
    again, _ = launcher.run(HERE, "secure_steps")
    assert one["sizes"] == two["sizes"] != again["sizes"]
    assert one["tokens"] == two["tokens"]
    assert all(torch.equal(one["weights"][name], two["weights"][name]) for name in one["weights"])


def test_a_sample_without_a_finite_gradient_is_counted_everywhere(launcher: Launcher) -> None:
    for one in launcher.run(HERE, "one_bad_sample", ranks=2):
        assert one == {"found": [1], "finite": True}


def test_ranks_start_from_the_weights_of_rank_0_with_dropout_of_their_own(
    launcher: Launcher,
) -> None:
    one, two = launcher.run(HERE, "other_weights")
    assert torch.equal(one["weight"], two["weight"])
    assert torch.equal(one["bias"], two["bias"])
    assert not torch.equal(one["dropout"], two["dropout"])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_checkpointing_and_half_precision(launcher: Launcher, sharded: bool) -> None:
    (alone,) = launcher.run(HERE, "kinds_of_models", ranks=1)
    for one in launcher.run(HERE, "kinds_of_models", ranks=2, sharded=sharded):
        for kind, expected in alone.items():
            tolerance = 2e-2 if kind == "bfloat16" else 1e-9
            assert one[kind]["loss"] == pytest.approx(expected["loss"], rel=tolerance)
            for name, tensor in expected["weights"].items():
                close = torch.allclose(one[kind]["weights"][name], tensor, rtol=0, atol=tolerance)
                assert close, (kind, name)


@pytest.mark.slow
def test_compiled_models(launcher: Launcher) -> None:
    """Every rank compiles its own model."""
    (alone,) = launcher.run(HERE, "compiled_steps", ranks=1)
    for one in launcher.run(HERE, "compiled_steps", ranks=2):
        for name, tensor in alone.items():
            assert torch.allclose(one[name], tensor, rtol=0, atol=1e-9), name


def test_units_cuts_and_banded_noise_do_not_depend_on_the_number_of_ranks(
    launcher: Launcher,
) -> None:
    (alone,) = launcher.run(HERE, "mechanisms", ranks=1)
    for one in launcher.run(HERE, "mechanisms", ranks=2):
        for name, expected in alone.items():
            for parameter, tensor in expected.items():
                assert torch.allclose(one[name][parameter], tensor, rtol=1e-9, atol=1e-9), name
