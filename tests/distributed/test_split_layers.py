"""Layers that `parallelize_module` has split over ranks: the result is that of one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from distributed.launching import Launcher

HERE = "distributed.split_layers"


@pytest.mark.parametrize("name", ["mlp", "block", pytest.param("bert", marks=pytest.mark.slow)])
def test_split_layers_change_nothing(launcher: Launcher, name: str) -> None:
    """Empty, uneven and full batches, clips and noise: float64, to 1e-9."""
    (alone,) = launcher.run(HERE, "trained", ranks=1, name=name, splits=False, shuffle="off")
    found = launcher.run(HERE, "trained", name=name, splits=True, check_rate=1.0)
    for one in found:
        assert one["shuffle"] == "off"
        assert one["weights"].keys() == alone["weights"].keys()
        for key, tensor in alone["weights"].items():
            assert torch.allclose(one["weights"][key], tensor, rtol=1e-9, atol=1e-9), key
            assert torch.equal(one["weights"][key], found[0]["weights"][key])
        assert torch.allclose(one["norms"], alone["norms"], rtol=1e-9)
        assert torch.equal(one["norms"], found[0]["norms"])
        assert (one["claim"], one["spent"]) == (alone["claim"], alone["spent"])
        for mine, theirs in zip(one["metrics"], alone["metrics"], strict=True):
            assert mine["batch_size"] == theirs["batch_size"]
            assert (mine["loss"] or 0.0) == pytest.approx(theirs["loss"] or 0.0, rel=1e-9)
        assert one["sums"] >= 3
        assert one["checked"] > 0
        assert not any("(make_private was given no loss=)" in each for each in one["assumed"])
        assert one["held"] < alone["held"]


@pytest.mark.slow
def test_padded_batches_means_and_half_precision(launcher: Launcher) -> None:
    (alone,) = launcher.run(HERE, "other_loops", ranks=1, splits=False)
    for one in launcher.run(HERE, "other_loops", ranks=4, splits=True):
        for kind, room in {"padded": 1e-9, "mean": 1e-9, "half": 2e-2}.items():
            for name, tensor in alone[kind].items():
                assert torch.allclose(one[kind][name], tensor, rtol=room, atol=room), (kind, name)


def test_every_rank_draws_the_noise_of_its_part(launcher: Launcher) -> None:
    """Bit for bit what one process draws, of layers split either way and of all others."""
    (alone,) = launcher.run(HERE, "noise_alone", ranks=1, splits=False)
    for ranks in (2, 4):
        for one in launcher.run(HERE, "noise_alone", ranks=ranks, splits=True):
            assert one.keys() == alone.keys()
            assert all(torch.equal(one[name], alone[name]) for name in alone)


@pytest.mark.parametrize("seed", [pytest.param(3, marks=pytest.mark.slow), None])
@pytest.mark.slow
def test_dropout_and_secure_noise(launcher: Launcher, seed: int | None) -> None:
    """What is whole stays the same on all ranks, and the checks can follow."""
    options = {"name": "block with dropout", "splits": True, "seed": seed, "check_rate": 1.0}
    one, two = launcher.run(HERE, "trained", **options)
    assert one["sums"] >= 3
    assert all(torch.equal(one["weights"][name], two["weights"][name]) for name in one["weights"])


@pytest.mark.slow
def test_all_ranks_augment_alike(launcher: Launcher) -> None:
    (alone,) = launcher.run(HERE, "augmented", ranks=1, splits=False)
    for one in launcher.run(HERE, "augmented", splits=True):
        for name, tensor in alone.items():
            assert torch.allclose(one[name], tensor, rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("sums", "the sum of clipped gradients is"),
        ("norms", "where plain autograd has"),
        ("exchange", "rows of the sums are not as long as the parts"),
        ("weights", "compute the same on every rank"),
        ("losses", "have other losses for the same records"),
        ("records", "has another set of records than rank"),
    ],
)
def test_a_fault_is_noticed_before_anything_is_released(
    launcher: Launcher, fault: str, words: str
) -> None:
    found = launcher.run(HERE, "faulty", name="block", fault=fault)
    assert any(words in one["said"] for one in found), found
    assert all(one["said"] and one["spent"] == 0 for one in found)


def test_a_healthy_run_is_not_refused(launcher: Launcher) -> None:
    for one in launcher.run(HERE, "faulty", name="block", fault=""):
        assert one == {"said": "", "spent": 2}


def test_a_sample_without_a_finite_gradient_counts_as_nothing(launcher: Launcher) -> None:
    for one in launcher.run(HERE, "one_bad_sample"):
        assert one == {"found": [1], "finite": True}


def test_other_ways_to_split_are_refused_by_name(launcher: Launcher) -> None:
    one, two = launcher.run(HERE, "refusals")
    assert one == two
    for axis, name in {"pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        assert f"got an axis '{axis}', as of {name} parallelism" in one.pop(axis)
    named = {
        "declared": "got an axis 'pp', as of pipeline parallelism",
        "another mesh": "expected a mesh of one axis with all 2 ranks",
        "with fully_shard": "got an axis 'tp', as of tensor parallelism",
        "table": "0: expected a linear layer split evenly by its outputs or its inputs, got Emb",
        "sequence": "0: expected a linear layer split evenly by its outputs or its inputs, got Lay",
        "uneven": "0: expected a linear layer split evenly by its outputs or its inputs, got Lin",
        "compiled": "0: expected modules that are not compiled, where layers are split over ranks",
        "shuffle": "shuffle: expected 'off' where layers are split over ranks",
        "paper": "shuffle: expected 'off' where layers are split over ranks",
        "batch clip": "batch_clip_norm: expected None where layers are split over ranks",
        "per layer": "clip: expected one factor for a sample where layers are split over ranks",
        "opacus": "method: expected one of ours for a sharded model",
        "alone": "expected a model that a rank can run by itself, got layers split over ranks",
        "between": "expected layers that are not split to compute the same on every rank",
        "by hand": "0: expected an input laid out as R by parallelize_module",
    }
    assert one.keys() == named.keys()
    for name, words in named.items():
        assert words in one[name], (name, one[name])


def test_a_step_sends_few_messages_and_pickles_nothing(launcher: Launcher) -> None:
    """Torch adds up activations between layers, by other calls; the rest is ours."""
    for found in launcher.run(HERE, "collectives_of_a_step"):
        sent = Counter(name.removeprefix("c10d::") for name, _ in found["seen"])
        # Two layers split by inputs, and in one message their biases and what is not split.
        assert sent["_reduce_scatter_base_"] == sent["_allgather_base_"] == 2 + 1
        assert sum(sent.values()) <= 17
        assert max(size for _, size in found["seen"]) < 0.3 * found["model"]
