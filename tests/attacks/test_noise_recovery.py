"""Whoever sees the weights before and after a step cannot compute its noise; once they could."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from attacks import sfc64
from attacks.recover import Layout, Observation, Recovered, _angle_words, halves, recover, tiles
from attacks.victims import Step, old_step, real_step
from shuffled_dpsgd.core.noise import LANES, normals
from shuffled_dpsgd.core.streams import words
from slow_cases import one_in


def unused(found: Recovered, size: int) -> np.ndarray:
    """The coordinates that the attack has not used."""
    others = np.ones(size, dtype=bool)
    others[found.used] = False
    return others


def likeness(found: Recovered, step: Step) -> float:
    """How predictions correlate with noise that the attack has not used."""
    others = unused(found, step.before.size) & step.untouched
    predicted = found.predict(step.before.size)[others]
    return float(np.corrcoef(predicted, step.seen.noise[others])[0, 1])


def test_states_go_back_as_they_went_forth() -> None:
    bits = np.random.SFC64(7)
    states = []
    for _ in range(3):
        states.append(sfc64.State(*(int(word) for word in bits.state["state"]["state"])))
        bits.random_raw()
    assert states[0].counter == sfc64.FIRST_COUNTER
    assert [sfc64.before(state) for state in states[1:]] == states[:-1]


def test_the_words_of_todays_noise_are_read_off_right() -> None:
    """So what the attack on a real run fails at is the stream, and not what it knows of it."""
    key, size = bytes(range(32)), 4 * LANES
    drawn = normals(key, 0, 0, size).numpy().astype(np.float64)
    seen = Observation(noise=drawn, error=1e-6 * np.ones(size))
    low, high = _angle_words(seen, tiles(size, LANES))
    word = words(key, 0, 2 * LANES, stream=2).view(np.uint32)
    width = (high - low) % 2**32
    assert ((word - low) % 2**32 <= width).all()
    assert np.median(width) < 2**13


def test_the_noise_of_the_old_generator_is_recovered() -> None:
    step, noise = old_step(seed=4)
    found = recover(step.seen, halves(noise.size))
    assert found is not None
    assert found.used.size < 30
    apart = np.abs(found.predict(noise.size) - noise)
    assert apart[unused(found, noise.size)].max() < 1e-5


@pytest.mark.parametrize("layout", one_in(2, [functools.partial(tiles, lanes=LANES), halves]))
def test_the_noise_of_a_real_run_is_not(layout: Callable[[int], Layout]) -> None:
    """Neither in the old generator's layout nor in today's, in which the angles are right."""
    step = real_step()
    found = recover(step.seen, layout(step.before.size))
    assert found is None, f"predictions correlate with the noise by {likeness(found, step):.6f}"
