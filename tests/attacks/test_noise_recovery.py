"""Whoever sees the weights before and after a step cannot compute its noise; once they could."""

from __future__ import annotations

import numpy as np

from attacks import sfc64
from attacks.recover import Recovered, halves, recover
from attacks.victims import Step, old_step, real_step


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


def test_the_noise_of_the_old_generator_is_recovered() -> None:
    step, noise = old_step(seed=4)
    found = recover(step.seen, halves(noise.size))
    assert found is not None
    assert found.used.size < 30
    apart = np.abs(found.predict(noise.size) - noise)
    assert apart[unused(found, noise.size)].max() < 1e-5


def test_the_noise_of_a_real_run_is_not() -> None:
    step = real_step()
    found = recover(step.seen, halves(step.before.size))
    assert found is None, f"predictions correlate with the noise by {likeness(found, step):.6f}"
