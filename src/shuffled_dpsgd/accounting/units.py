"""Protecting somebody with several records: draw units, or draw records and account for groups.

Both are proven, and both need public sizes alone (Charles et al. 2024, arXiv 2407.07737):

- *Units are drawn*: each joins a step with probability U/N, and the mean gradient of at most k of
  its records is clipped. U·k records are computed in a step.
- *Records are drawn*: each joins with probability R/M and is clipped by itself. Whoever owns m
  records moves the sum by as many of them as were drawn (`pld.pairs_of`); nobody may own more.

Compared is the noise on the mean gradient of a step, at one clip norm and with as many records
computed. Where the records of a unit disagree, their mean is shorter, by up to √k, and so may be
the clip norm: then drawing units is better by up to that factor.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shuffled_dpsgd.accounting.calibration import (
    CALIBRATION_ERROR,
    calibrate_certified,
    smallest_noise_multiplier,
)
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError

_MOST_OWNED = 512


@dataclass(frozen=True, kw_only=True)
class UnitComparison:
    """Noise multipliers for one ε of a whole unit, and the noise on a step's mean gradient."""

    epsilon: float
    delta: float
    noise_of_units: float
    noise_of_records: float
    ratio: float
    ratio_if_records_disagree: float

    @property
    def better(self) -> str:
        """What to draw: units, records, or either, where it depends on how the records agree."""
        if self.ratio <= 1.0:
            return "units"
        return "records" if self.ratio_if_records_disagree > 1.0 else "either"

    def describe(self) -> str:
        """One line for people."""
        advice = {
            "units": "draw units",
            "records": "draw records and account for the group",
            "either": "draw units if the records of a unit disagree, else records",
        }
        return (
            f"noise with units drawn over noise with records drawn (proven, same ε of a unit and "
            f"as many records a step): {self.ratio:.3g} if the records of a unit agree, "
            f"{self.ratio_if_records_disagree:.3g} if they do not: {advice[self.better]}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"kind": "proven", "better": self.better}


def compare_units(
    *,
    epsilon: float,
    delta: float,
    num_units: int,
    num_records: int,
    most_owned: int,
    expected_units: int,
    records_per_unit: int,
    num_steps: int,
) -> UnitComparison:
    """Compare the two for one data set: `most_owned` is the most records that a unit may own."""
    sizes = {
        "num_units": (num_units, num_records),
        "expected_units": (expected_units, num_units),
        "records_per_unit": (records_per_unit, most_owned),
        "most_owned": (most_owned, min(num_records, _MOST_OWNED)),
    }
    for name, (value, most) in sizes.items():
        if not 1 <= value <= most:
            raise InvalidArgumentError(name, expected=f"from 1 to {most}", got=value)
    check_delta(delta)
    rows = expected_units * records_per_unit
    units = calibrate_certified(
        epsilon=epsilon, delta=delta, sampling_prob=expected_units / num_units, num_steps=num_steps
    ).noise_multiplier

    def priced(noise: float) -> float:
        run = SampledGaussian(
            noise_multiplier=noise, sampling_prob=min(1.0, rows / num_records), num_steps=num_steps
        )
        return price(run, delta, CALIBRATION_ERROR, records=most_owned)

    records = smallest_noise_multiplier(epsilon, priced, guess=units * most_owned)
    ratio = (units / expected_units) / (records / rows)
    return UnitComparison(
        epsilon=epsilon,
        delta=delta,
        noise_of_units=units,
        noise_of_records=records,
        ratio=ratio,
        ratio_if_records_disagree=ratio / math.sqrt(records_per_unit),
    )
