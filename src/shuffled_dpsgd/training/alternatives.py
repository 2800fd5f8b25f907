"""Alternatives to a plan at the same certified ε: the noise each leaves, and what it costs.

`noise` is the noise in the final weights, relative to how far gradients have moved them; learning
rates are taken as constant, and gradients as in agreement. `records` is the number of records
computed. Both are ratios to plain DP-SGD with the plan's batch and steps, from public sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shuffled_dpsgd.accounting import calibrate_certified
from shuffled_dpsgd.accounting.banded import WORTH_IT, banded_noise
from shuffled_dpsgd.training.prospect import Prospect, calibrated_prospect

_FACTORS = (2, 4)
# In standard deviations of a draw. Larger draws are too rare for cutting them to cost anything.
_HEADROOM = 6.0
# Rates that fall linearly have a mean square of 4/3 of the square of their mean.
_FALLING = math.sqrt(4.0 / 3.0)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One row, over plain DP-SGD."""

    change: str
    noise: float
    records: float
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def alternatives(
    now: Prospect,
    *,
    epsilon: float,
    delta: float,
    embeddings: int = 0,
    largest_batch: int | None = None,
) -> Iterator[Alternative]:
    """Every row that the sizes allow; `embeddings` counts the trained weights of embedding tables.

    If the plan has no `largest_batch`, the row names one that costs next to nothing.
    """
    batch, steps, size = now.expected_batch_size, now.num_steps, now.dataset_size
    known: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "dataset_size": size}

    def prospect(batch: int, steps: int) -> Prospect:
        sizes = {"expected_batch_size": batch, "num_steps": steps, "dimension": now.dimension}
        return calibrated_prospect(**known, **sizes)

    plain = prospect(batch, steps)

    def noise_of(other: Prospect) -> float:
        return plain.over_run / other.over_run

    for factor in _FACTORS:
        if factor * batch <= size:
            yield Alternative(
                change=f"{factor} times the batch, as many steps",
                noise=noise_of(prospect(factor * batch, steps)),
                records=factor,
            )
    for factor in _FACTORS:
        if factor * batch <= size and factor < steps:
            yield Alternative(
                change=f"{factor} times the batch, 1/{factor} of the steps",
                noise=noise_of(prospect(factor * batch, steps // factor)),
                records=factor * (steps // factor) / steps,
                note="each step must go further",
            )
    rate = batch / size
    found = banded_noise(epsilon=epsilon, delta=delta, sampling_prob=rate, num_steps=steps)
    best = min(found, key=lambda each: each.ratio, default=None)
    if best is not None:
        gains = "" if best.ratio <= WORTH_IT else "refused: it gains nothing here"
        change = f'noise="banded", blocks of {best.bands}'
        yield Alternative(change=change, noise=best.ratio, records=1.0, note=gains)
    most = largest_batch or math.ceil(batch + _HEADROOM * math.sqrt(batch * (1.0 - rate)))
    if most < size:
        cut = calibrate_certified(
            epsilon=epsilon, delta=delta, sampling_prob=rate, num_steps=steps, largest_batch=most,
            dataset_size=size,
        ).noise_multiplier  # fmt: skip
        yield Alternative(
            change=f"largest_batch={most}",
            noise=cut / plain.noise_multiplier,
            records=1.0,
            note="batches of one shape",
        )
    yield Alternative(
        change="rates that fall to zero, of the same sum",
        noise=_FALLING,
        records=1.0,
        note="where the loss is flat; less than 1 where it pulls back",
    )
    if 0 < embeddings < now.dimension:
        yield Alternative(
            change='embeddings = "freeze"',
            noise=math.sqrt(1.0 - embeddings / now.dimension),
            records=1.0,
            note=f"{embeddings:,} weights fewer",
        )
