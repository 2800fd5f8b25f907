"""Recover the noise of a private SGD step from the weights before and after it.

On a row of an embedding that no record touches, the clipped sum is zero: what the step changed
there is noise. The two members of a Box-Muller pair give the angle they were made from, and with
it the leading 21 bits or so of one 32-bit half of the generator's output. SFC64 is not one-way:
seven consecutive outputs with so many bits known determine its 192 bits of state, and a bit-vector
solver finds them in seconds, or proves that there are none. The state gives the rest of the noise,
on rows that records do touch as well, and subtracting it leaves the bare sum.

With outputs t and states (a, b, c), f(y) = y ^ (y >> 11) and the counter n, SFC64 is

    c_{k+1} = rotl(c_k, 24) + t_k        t_k = f(9 c_{k-2}) + 9 c_{k-1} + n_k

so that c at the first of the outputs and the unknown bits of the outputs are all the unknowns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import z3
from numpy.typing import NDArray

from attacks import sfc64
from attacks.sfc64 import State

OUTPUTS = 7
# Of a float32 in units of itself: half of what its last bit stands for, at most.
_ROUNDING = 2.0**-24
_TURN = 2.0**32


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Noise in units of its standard deviation, off by at most `error`; NaN where it is unknown."""

    noise: NDArray[np.float64]
    error: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which coordinates form pairs, in the order of their angle words.

    `first_half` counts the 32-bit halves of the generator's output before that of the first pair.
    """

    cosines: NDArray[np.int64]
    sines: NDArray[np.int64]
    first_half: int


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The generator before its first output, and the coordinates that gave it away."""

    state: State
    used: NDArray[np.int64]

    def predict(self, size: int) -> NDArray[np.float32]:
        """All noise of the piece, in units of its standard deviation."""
        return sfc64.standard_normal(sfc64.generator(self.state), size)


def observe(
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    untouched: NDArray[np.bool_],
    *,
    lr: float,
    noise_std: float,
    expected_batch_size: int,
) -> Observation:
    """What after = before - lr * (sum + noise) / expected_batch_size says where the sum is zero."""
    scale = lr * noise_std / expected_batch_size
    noise = (before.astype(np.float64) - after) / scale
    # The product that makes the number, times the std, divided by the batch size, times the rate;
    # and the subtraction from the weight.
    error = 6 * _ROUNDING * np.abs(noise) + _ROUNDING * np.abs(after) / scale
    return Observation(noise=np.where(untouched, noise, np.nan), error=error)


def halves(size: int) -> Layout:
    """The layout of the old generator."""
    pairs = -(-size // 2)
    cosines = np.arange(size - pairs)
    return Layout(cosines=cosines, sines=cosines + pairs, first_half=pairs)


def tiles(size: int, lanes: int) -> Layout:
    """The library's layout today: tiles of as many first members as second ones, angles apart."""
    whole = np.arange(size // (2 * lanes) * 2 * lanes).reshape(-1, 2, lanes)
    return Layout(cosines=whole[:, 0].ravel(), sines=whole[:, 1].ravel(), first_half=0)


def recover(seen: Observation, layout: Layout) -> Recovered | None:
    """The generator of this noise, or None where no state of SFC64 explains it.

    Raises:
        ValueError: too few coordinates are known.
    """
    low, high = _angle_words(seen, layout)
    # An output needs both of its halves.
    skipped = layout.first_half % 2
    low, high = (side[skipped : skipped + (side.size - skipped) // 2 * 2] for side in (low, high))
    known = _known_bits(low, high)
    by_output = known.reshape(-1, 2)
    windows = np.lib.stride_tricks.sliding_window_view(by_output, OUTPUTS, axis=0)
    worst, total = windows.min(axis=(1, 2)), windows.sum(axis=(1, 2))
    best = int(np.lexsort((total, worst))[-1])
    if total[best] < 4 * 64 or worst[best] == 0:
        raise ValueError(
            f"expected {OUTPUTS} consecutive outputs with 256 bits known, found {total[best]}: "
            "observe more coordinates, or more precisely"
        )
    place = slice(2 * best, 2 * (best + OUTPUTS))
    output = (layout.first_half + skipped) // 2 + best
    state = _solve(high[place], known[place], counter=sfc64.FIRST_COUNTER + output)
    if state is None:
        return None
    for _ in range(output):
        state = sfc64.before(state)
    pairs = np.arange(skipped + place.start, skipped + place.stop)
    used = np.concatenate([layout.cosines[pairs], layout.sines[pairs]])
    return Recovered(state=state, used=used)


def _angle_words(
    seen: Observation, layout: Layout
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the greatest angle word that each pair may come from, as unsigned numbers."""
    x, y = seen.noise[layout.cosines], seen.noise[layout.sines]
    radius = np.hypot(x, y)
    # Errors turn the pair by their part at right angles to it.
    across = np.abs(x / radius) * seen.error[layout.sines]
    across += np.abs(y / radius) * seen.error[layout.cosines]
    word = np.arctan2(y, x) * (_TURN / (2 * math.pi))
    # The word became a float32, and then that times a float32 near pi.
    error = across / radius * (_TURN / (2 * math.pi)) + 3 * _ROUNDING * np.abs(word) + 1
    return (word - error) % _TURN, (word + error) % _TURN


def _known_bits(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many leading bits the two bounds have in common."""
    differing = np.nan_to_num(low).astype(np.int64) ^ np.nan_to_num(high).astype(np.int64)
    # frexp's exponent is the length of a number in bits.
    return np.where(np.isnan(low), 0, 32 - np.frexp(differing.astype(np.float64))[1])


def _solve(words: NDArray[np.float64], known: NDArray[np.int64], *, counter: int) -> State | None:
    """The state before consecutive outputs of which each half begins with these bits."""
    pairs = zip(words, known, strict=True)
    parts = [_half(int(word), int(bits), i) for i, (word, bits) in enumerate(pairs)]
    outputs = [z3.Concat(high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    solver = z3.SolverFor("QF_BV")
    first = c = z3.BitVec("c", 64)
    for k in range(2, len(outputs)):
        following = z3.RotateLeft(c, 24) + outputs[k - 2]
        mixed = 9 * c ^ z3.LShR(9 * c, 11)
        solver.add(outputs[k] == mixed + 9 * following + counter + k)
        c = following
    verdict = solver.check()
    if verdict == z3.unsat:
        return None
    if verdict != z3.sat:
        raise RuntimeError(f"expected an answer of the solver, got: {solver.reason_unknown()}")
    model = solver.model()
    c_0, t_0, t_1 = (
        model.eval(term, model_completion=True).as_long()
        for term in (first, outputs[0], outputs[1])
    )
    return _state(c_0, t_0, t_1, counter)


def _half(word: int, known: int, index: int) -> z3.BitVecRef:
    unknown = 32 - known
    if unknown == 0:
        return z3.BitVecVal(word, 32)
    return z3.Concat(z3.BitVecVal(word >> unknown, known), z3.BitVec(f"rest{index}", unknown))


def _state(c_0: int, t_0: int, t_1: int, counter: int) -> State:
    """t_1 = f(b_0) + 9 c_0 + n_1 gives b_0, and t_0 = a_0 + b_0 + n_0 gives a_0."""
    mask = (1 << 64) - 1
    b_0 = sfc64.unmix(t_1 - 9 * c_0 - counter - 1 & mask)
    return State(t_0 - b_0 - counter & mask, b_0, c_0, counter)
