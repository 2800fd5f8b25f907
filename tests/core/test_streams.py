"""Streams and the sampler: ChaCha20 by its RFC; repeatable when seeded, never when secure."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from core.chacha20 import chacha20_block, chacha20_word
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import MOST_WORDS, RandomStreams, uniform_keys, words
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.global_randomness import loader_generator


def test_rfc_8439_block_and_key_stream() -> None:
    """Section 2.3.2's block, by the definition written out here and by the one in use."""
    key = bytes(range(32))
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    found = b"".join(word.to_bytes(4, "little") for word in chacha20_block(key, 1, nonce))
    assert found == expected
    # The nonce as three words: stream, group, and zero, which the vector's last word is.
    drawn = words(key, 16, 16, stream=0x09000000, group=0x4A000000)
    assert drawn.tobytes() == expected


def test_words_are_the_same_wherever_one_begins() -> None:
    whole = words(bytes(32), 0, 1000, stream=2, group=5)
    for first, count in ((0, 1), (15, 2), (16, 16), (999, 1), (301, 0)):
        part = words(bytes(32), first, count, stream=2, group=5)
        assert part.tolist() == whole[first : first + count].tolist()
    by_hand = chacha20_word(bytes(32), 2, 5, 777)
    assert int(whole[777]) & 0xFFFFFFFF == by_hand


def test_streams_beyond_their_counter_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="words of one stream"):
        words(bytes(32), MOST_WORDS, 1)


def test_seeded_keys_repeat_and_differ_by_purpose_step_index_and_attempt() -> None:
    def keys(streams: RandomStreams) -> list[bytes]:
        return [
            streams.key("noise", 0),
            streams.key("noise", 1),
            streams.key("noise", 0, 1),
            streams.key("noise", 0, attempt=1),
            streams.key("sampling", 0),
        ]

    assert keys(RandomStreams(seed=3)) == keys(RandomStreams(seed=3))
    every = {*keys(RandomStreams(seed=3)), *keys(RandomStreams(seed=3 + 2**32))}
    assert len(every) == 10


def test_secure_noise_is_never_keyed_twice_and_batches_are_until_their_release() -> None:
    released = {0: 0}
    streams, other = RandomStreams(releases=released.__getitem__), RandomStreams()
    assert streams.secure
    assert streams.key("noise", 0) != streams.key("noise", 0)
    before = streams.key("sampling", 0)
    assert streams.key("sampling", 0) == before != other.key("sampling", 0)
    released[0] = 1
    assert streams.key("sampling", 0) != before


def test_permutation_keys_are_uniform() -> None:
    drawn = uniform_keys(bytes(32), 100_000)
    assert drawn.min() >= 0
    assert drawn.mean() / 2**63 == pytest.approx(0.5, abs=0.005)


def test_generators_for_loaders_repeat_with_the_seed() -> None:
    one, other = (loader_generator(RandomStreams(seed=2), "loader", 7) for _ in range(2))
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=other))


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


def test_a_draw_costs_what_the_batch_does() -> None:
    """A hundred million records, of which a thousand are drawn, need no memory for the others."""
    tracemalloc.start()
    drawn = sampler(10**8, 1e-5).indices(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 800 < drawn.numel() < 1200
    assert peak < 1 << 20


@pytest.mark.parametrize("prob", [1e-3, 0.5, 0.97])
def test_gaps_are_those_of_independent_coins(prob: float) -> None:
    size = 2000
    joined = np.zeros(size)
    steps = 3000
    for step in range(steps):
        joined[sampler(size, prob).indices(step).numpy()] += 1.0
    counts = joined / steps
    assert counts.mean() == pytest.approx(prob, abs=5 * np.sqrt(prob / (steps * size)))
    # The first and the last records are drawn like all others.
    room = 5 * np.sqrt(prob * (1 - prob) / (20 * steps))
    assert counts[:20].mean() == pytest.approx(prob, abs=room)
    assert counts[-20:].mean() == pytest.approx(prob, abs=room)
