"""Streams: reproducible when seeded, never twice the same when secure, keyed beyond 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import PoissonSampler, RandomStreams


def test_seeded_streams_repeat_and_differ_by_purpose_step_and_index() -> None:
    streams = RandomStreams(seed=3)
    keys = [("noise", 0, 0), ("noise", 1, 0), ("noise", 0, 1), ("sampling", 0, 0)]
    draws = [streams.numpy(*key).standard_normal(4).tolist() for key in keys]  # type: ignore[arg-type]
    again = [streams.numpy(*key).standard_normal(4).tolist() for key in keys]  # type: ignore[arg-type]
    assert draws == again
    assert len({tuple(draw) for draw in draws}) == len(keys)


def test_torch_streams_use_more_than_thirty_two_bits_of_the_seed() -> None:
    low = RandomStreams(seed=1).torch("permutation", 0)
    high = RandomStreams(seed=1 + 2**32).torch("permutation", 0)
    assert not torch.equal(torch.randn(8, generator=low), torch.randn(8, generator=high))
    plain = torch.Generator()
    same = [torch.randn(8, generator=plain.manual_seed(s)) for s in (1, 1 + 2**32)]
    assert torch.equal(*same), "torch now uses the whole seed; the state need not be filled by hand"


def test_torch_streams_look_uniform() -> None:
    uniform = torch.rand(100_000, generator=RandomStreams(seed=2).torch("permutation", 7))
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(uniform.var()) == pytest.approx(1 / 12, abs=0.002)


def test_secure_streams_never_repeat() -> None:
    streams = RandomStreams()
    assert streams.secure
    first, second = (streams.numpy("noise", 0).standard_normal(4) for _ in range(2))
    assert not np.array_equal(first, second)
    assert streams.token(0) != streams.token(0)


def test_seeded_tokens_name_the_step() -> None:
    assert RandomStreams(seed=1).token(4) == RandomStreams(seed=1).token(4)
    assert RandomStreams(seed=1).token(4) != RandomStreams(seed=2).token(4)
    assert RandomStreams(seed=1).token(4, start="a") != RandomStreams(seed=1).token(4, start="b")


def test_negative_seed_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="seed"):
        RandomStreams(seed=-1)


def sampler(size: int, prob: float) -> PoissonSampler:
    return PoissonSampler(dataset_size=size, sampling_prob=prob, streams=RandomStreams(seed=9))


def test_every_record_joins_independently_with_the_same_probability() -> None:
    drawn = sampler(50, 0.3)
    steps = 4000
    joined = np.zeros((steps, 50))
    for step in range(steps):
        joined[step, drawn.indices(step).numpy()] = 1.0
    assert np.abs(joined.mean(axis=0) - 0.3).max() < 5 * np.sqrt(0.21 / steps)
    correlation = np.corrcoef(joined.T) - np.eye(50)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(steps)
    sizes = joined.sum(axis=1)
    assert sizes.var() == pytest.approx(50 * 0.21, rel=0.12)


def test_batches_can_be_empty_or_everything() -> None:
    assert {len(sampler(3, 0.2).indices(step)) for step in range(100)} >= {0, 1, 2}
    assert sampler(7, 1.0).indices(0).tolist() == list(range(7))


@pytest.mark.parametrize("prob", [0.0, -0.1, 1.01, float("nan")])
def test_impossible_probabilities_are_refused(prob: float) -> None:
    with pytest.raises(InvalidArgumentError, match="sampling_prob"):
        sampler(5, prob)


def test_key_words_differ_by_place_and_from_every_other_stream_s() -> None:
    streams = RandomStreams(seed=5)
    places = [("noise", 0, 0), ("noise", 1, 0), ("noise", 0, 1), ("permutation", 0, 0)]
    keys = [streams.words(purpose, step, index) for purpose, step, index in places]  # type: ignore[arg-type]
    assert len({word for key in keys for word in key}) == 16
    assert all(0 <= word < 1 << 32 for key in keys for word in key)
    assert streams.words("noise", 1) == keys[1]
    state = streams._sequence("noise", 0, 0).generate_state(4, np.uint32).tolist()
    assert not set(state) & set(keys[0])
    secure = RandomStreams()
    assert secure.words("noise", 0) != secure.words("noise", 0)
