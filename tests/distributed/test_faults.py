"""Launches that must not begin, and ranks that fail or die."""

from __future__ import annotations

import signal
import time

import pytest

from distributed.launching import Launcher
from shuffled_dpsgd.distributed import current_world, launched
from shuffled_dpsgd.distributed.world import TIMEOUT_VARIABLE
from shuffled_dpsgd.errors import InvalidArgumentError

HERE = "distributed.replicas"


def test_bad_launches_are_refused_before_the_first_step(launcher: Launcher) -> None:
    one, two = launcher.run(HERE, "bad_launches")
    assert one == two
    named = {
        "seed": "rank 1 has another plan, in seed than rank 0",
        "clip": "rank 1 has another plan, in clip_norm than rank 0: 2.0 and 1.0",
        "kind": "rank 1 has another kind of model than rank 0: 'sharded' and 'whole'",
        "command": "rank 1 has another training.evaluate_every than rank 0: 3 and 2",
        "model": "rank 1 has another plan, in blocks than rank 0",
        "version": "rank 1 has another version of torch than rank 0",
        "data": "rank 1 has another set of records than rank 0",
        "optimizer": "rank 1 has another optimizer than rank 0",
        "frame": "noise_frame: expected 'shuffled' with several ranks",
        "wrapped": "got DistributedDataParallel; pass the wrapped model, usually .module",
        "wrapped inside": "0: expected the model itself on every rank, got DistributedDataParallel",
    }
    for name, words in named.items():
        assert words in one[name], one[name]
    rates = one["optimizer"].split("than rank 0: ")[1]
    assert "'lr': '0.2'" in rates
    assert "'lr': '0.1'" in rates


def test_data_that_differ_anywhere_or_from_some_epoch_on_are_refused(launcher: Launcher) -> None:
    one, two = launcher.run(HERE, "data_that_differ")
    assert one == two
    other = "rank 1 has another set of records than rank 0"
    assert other in one["some"]
    assert other in one["augmented"]
    assert one["alike"] == ""
    # Three steps are an epoch; the data change during the second of them.
    assert other in one["later"]
    assert one["steps before"] == [1, 2, 3]


def test_ranks_that_draw_different_batches_release_nothing(launcher: Launcher) -> None:
    for refusal in launcher.run(HERE, "drawn_differently"):
        assert "rank 1 has another logical batch than rank 0" in refusal


def test_a_rank_that_cannot_load_a_record_tells_the_others(launcher: Launcher) -> None:
    for rank in (0, 1):
        launcher.start(HERE, "broken_data", rank=rank)
        assert launcher.wait() == [1, 1]
        assert "OSError: the disk is gone" in launcher.error(rank)
        assert f"another rank failed: rank {rank}: OSError: the disk is gone" in launcher.error(
            1 - rank
        )


def test_a_rank_killed_in_a_step_ends_the_others(launcher: Launcher) -> None:
    """And they say so, though torchrun tells them to end in the same moment."""
    started = time.monotonic()
    launcher.start(HERE, "killed_in_a_step", rank=1)
    assert launcher.wait() == [1, -signal.SIGKILL]
    assert time.monotonic() - started < 30
    said = launcher.error(0)
    assert "RankError: rank 0 of 2 waited for sums of all ranks, but a rank is gone" in said
    assert "resume from the last checkpoint" in said


@pytest.mark.slow
def test_a_rank_killed_in_a_shuffle_of_shards_ends_the_others(launcher: Launcher) -> None:
    """None takes for another's failure that it could not reach it."""
    launcher.start("distributed.shards", "killed_in_a_shuffle", rank=1)
    assert launcher.wait() == [1, -signal.SIGKILL]
    said = launcher.error(0)
    assert "RankError: rank 0 of 2 waited for weights of all ranks, but a rank is gone (" in said
    assert "another rank failed" not in said


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named_and_not_waited_for_for_ever(
    launcher: Launcher, inside: bool
) -> None:
    launcher.start(
        HERE, "hanging", ranks=3, rank=1, seconds=3.0, inside=inside,
        environment={"SHUFFLED_DPSGD_TIMEOUT_S": "1.5"},
    )  # fmt: skip
    assert launcher.wait() == [0, 0, 0]
    for rank, found in enumerate(launcher.results(3)):
        if rank != 1:
            assert f"rank {rank} has waited" in found["said"]
            assert found["said"].endswith(" s for rank 1\n")
            what = "weights" if inside else "facts"
            expected = f"rank {rank} of 3 waited for {what} of all ranks, but rank 1 did not come ("
            assert expected in found["refusal"]


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "inf"])
def test_a_timeout_is_a_positive_number(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", TIMEOUT_VARIABLE: seconds}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=TIMEOUT_VARIABLE), launched("cpu"):
        pass


def test_ranks_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(InvalidArgumentError, match="each rank has a GPU of its own"),
        launched("cuda:0"),
    ):
        pass


def test_processes_that_have_not_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match=r"2 processes of a launcher, each on its own"):
        current_world()


@pytest.mark.parametrize("fault", ["lost", "twice", "mixed"])
def test_an_exchange_that_gives_other_sums_is_stopped(launcher: Launcher, fault: str) -> None:
    launcher.start(HERE, "faulty_exchange", fault=fault)
    assert launcher.wait() == [1, 1]
    for rank in (0, 1):
        assert "RefereeError: step 0: the total over all processes" in launcher.error(rank)
