"""The replay passes for every strategy and family, measures what it says, and refuses misuse."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from auditing.planted import NormWithoutBias, build_model, build_records, noisy, quiet
from auditing.statistics_of_parts import check_sampler
from shuffled_dpsgd.auditing.checks import Check
from shuffled_dpsgd.auditing.sensitivity import Replay, check_sensitivity, joint_norm, quiet_run
from shuffled_dpsgd.clipping.reference import clipped_sum_reference
from shuffled_dpsgd.errors import InvalidArgumentError
from slow_cases import one_in

pytestmark = pytest.mark.filterwarnings("ignore:losses are multiplied")


PAIRS = itertools.product(
    ("bookkeeping", "ghost", "mixed", "instantiate"), ("flat", "automatic", "per-layer")
)


@pytest.mark.parametrize("pair", one_in(2, PAIRS), ids=str)
def test_every_strategy_and_clip_holds(pair: tuple[str, str]) -> None:
    strategy, clip = pair
    private = quiet_run(
        build_model(), expected_batch_size=4, strategy=strategy, clip=clip, clip_norm=0.5
    )
    report = check_sensitivity(private, build_records(4))
    assert report.passed, report.failed
    assert report.setting["strategy"] == strategy


def test_the_replay_equals_the_slow_oracle() -> None:
    """What is replayed is the sum of clipped gradients, not something that merely has its norm."""
    model, records = build_model(), build_records(3)
    private = quiet_run(model, expected_batch_size=5, clip_norm=0.7)
    released = Replay(private, records).release(range(3))
    expected = clipped_sum_reference(
        model,
        lambda network, example: records.losses(network, (example[0][None],))[0],
        records.examples,
        clip_norm=0.7,
    )
    for name, tensor in expected.clipped_sum.items():
        torch.testing.assert_close(released[name], tensor.double(), rtol=1e-6, atol=1e-9)


def test_a_failing_check_names_itself_and_its_record() -> None:
    private = quiet()
    private.engine = NormWithoutBias(private)
    report = check_sensitivity(private, build_records())
    assert "one record alone" in report.failed
    (check,) = [one for one in report.checks if one.name == "one record alone"]
    assert check.measured > check.allowed
    assert "record" in check.detail


def test_noise_or_learning_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="noise_multiplier=0"):
        Replay(noisy(), build_records())


def test_checks_fail_on_nan() -> None:
    assert not Check(name="broken", measured=math.nan, allowed=1.0).passed
    assert math.isnan(joint_norm({"w": torch.tensor([math.nan])}))
    assert joint_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}) == pytest.approx(5.0)


def test_the_runs_own_sampler_passes_for_many_seeds() -> None:
    """Twenty seeds: the false-alarm rate is one in ten thousand."""
    from shuffled_dpsgd.training import PoissonSampler, RandomStreams

    for seed in range(20):
        sampler = PoissonSampler(
            dataset_size=300, sampling_prob=0.05, streams=RandomStreams(seed=seed)
        )
        assert check_sampler(sampler, sampling_prob=0.05, num_steps=80).passed
