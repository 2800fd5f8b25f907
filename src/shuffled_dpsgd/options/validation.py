"""What is refused of the options: values out of range, and values that contradict each other.

Each check takes the part of the options it can judge, so that a section of a file is refused as
soon as it is read. Contradictions are refused, never resolved silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.options.methods import OPEN

if TYPE_CHECKING:
    from shuffled_dpsgd.options.statement import Budget, PrivacyOptions, Schedule


_LEAST_EPSILON = 1e-6
_TINY = math.ulp(0.0)
# The least and the greatest value of each number, and those in words.
_RANGES = {
    "delta": (_TINY, math.nextafter(1.0, 0.0), "a number in (0, 1)"),
    "clip_norm": (_TINY, math.inf, "a positive number"),
    "clip_quantile": (_TINY, math.nextafter(1.0, 0.0), "a number in (0, 1)"),
    "check_rate": (0.0, 1.0, "a number from 0 to 1"),
    "epsilon": (_TINY, math.nextafter(math.inf, 0.0), "a positive number"),
    "noise_multiplier": (0.0, math.nextafter(math.inf, 0.0), "a non-negative number"),
    "unshuffled_noise_multiplier": (0.0, math.nextafter(math.inf, 0.0), "a non-negative number"),
    "batch_clip_norm": (_TINY, math.inf, "a positive number or None"),
}
_REQUIRED = ("delta", "clip_norm", "check_rate")


def check_choices(options: object, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Check that every option with choices has one of them."""
    for name, allowed in choices.items():
        value = getattr(options, name)
        open_too = value is None and (name in OPEN or name == "method")
        require(value in allowed or open_too, name, f"one of {allowed}", value)


def check_budget(budget: Budget) -> None:
    """Check that ε, δ, noise and clips are in range and do not contradict each other."""
    for name, (least, most, expected) in _RANGES.items():
        value = getattr(budget, name)
        if value is None and name not in _REQUIRED:
            continue
        require(isinstance(value, Real) and not isinstance(value, bool), name, "a number", value)
        require(least <= value <= most, name, expected, value)
    epsilon, noise, clip_norm = budget.epsilon, budget.noise_multiplier, budget.clip_norm
    require(
        (epsilon is None) != (noise is None),
        "epsilon",
        "exactly one of epsilon and noise_multiplier",
        {"epsilon": epsilon, "noise_multiplier": noise},
        "epsilon calibrates the noise, noise_multiplier fixes it",
    )
    require(
        epsilon is None or epsilon >= _LEAST_EPSILON,
        "epsilon",
        f"at least {_LEAST_EPSILON:g}",
        epsilon,
        "under so much noise nothing is learned, and no accountant is exact; leave the records "
        "out instead",
    )
    require(
        math.isfinite(clip_norm) or noise == 0.0,
        "clip_norm",
        "a finite number, unless noise_multiplier=0",
        clip_norm,
        "noise is scaled by clip_norm",
    )
    _check_unit(budget)
    _check_banded(budget)
    _check_paper(budget)
    follows = budget.clip_quantile is not None
    finite = not follows or math.isfinite(clip_norm)
    require(finite, "clip_norm", "a clip to start from", clip_norm)
    wanted = {"noise_frame": "shuffled", "noise": "independent", "accounting": "certified or rdp"}
    for name, expected in wanted.items():
        # Noise that comes back in a later step would come back at another clip.
        if follows and getattr(budget, name) not in expected.split(" or "):
            raise _clash("clip_quantile", budget, name, expected)
    if budget.noise_frame == "unshuffled" and budget.shuffle != "every-step":
        raise _clash("noise_frame='unshuffled'", budget, "shuffle", "every-step")


def _check_unit(budget: Budget) -> None:
    """Check that a unit has a name, and that drawn units come with a column or ids of records."""
    unit, drawn = budget.unit, budget.records_per_unit
    expected = "a name for what one row is, such as patient"
    if isinstance(unit, str):
        require(unit.strip(), "unit", expected, unit)
    else:
        ids = f"{expected}, unless records_per_unit goes with it"
        require(drawn is not None, "unit", ids, type(unit).__name__)
    if drawn is None:
        return
    _check_positive_integer("records_per_unit", drawn)
    alone = "nothing with records_per_unit: the file counts runs on rows, not on units"
    require(budget.budget is None, "budget", alone, budget.budget)
    wanted = "unit= the column or the list that says whose a record is, and our own engine"
    if unit == "row" or budget.method == "opacus":
        name = "unit" if unit == "row" else "method"
        raise _clash("records_per_unit", budget, name, wanted)


def _check_banded(budget: Budget) -> None:
    """Check that banded noise is certified, without a budget file, in blocks of 2 steps or more."""
    bands = budget.bands
    if budget.noise != "banded":
        require(bands is None, "bands", "nothing without noise='banded'", bands)
        return
    fine = bands is None or (isinstance(bands, int) and bands >= 2)
    require(fine, "bands", "2 or more", bands)
    if budget.accounting != "certified" or budget.budget is not None:
        wanted = "accounting='certified' without a budget file, which counts independent steps"
        raise _clash("noise='banded'", budget, "accounting budget", wanted)
    known = budget.epsilon is not None or bands is not None
    require(
        known, "bands", "a number of steps with noise_multiplier; with epsilon it is chosen", None
    )


def _check_paper(budget: Budget) -> None:
    """Check that the paper's formula has its inputs, and that no other accounting is given them."""
    by_paper = budget.accounting == "paper"
    require(
        not by_paper or budget.batch_clip_norm is not None,
        "batch_clip_norm",
        "an explicit value with accounting='paper'",
        None,
        "the paper's formula depends on it more than on anything else",
    )
    if by_paper and budget.shuffle == "off":
        raise _clash("accounting='paper'", budget, "shuffle", "every-step or at-release")
    two = by_paper and budget.noise_multiplier is not None
    require(
        two == (budget.unshuffled_noise_multiplier is not None),
        "unshuffled_noise_multiplier",
        "a value exactly when accounting='paper' and noise_multiplier is given",
        budget.unshuffled_noise_multiplier,
        "Algorithm 1 needs sigma for the shuffled block and sigma_0 for the rest",
    )


def check_schedule(schedule: Schedule) -> None:
    """Check that sizes are positive and the length is given exactly once."""
    _check_positive_integer("expected_batch_size", schedule.expected_batch_size)
    for name in ("epochs", "num_steps", "physical_batch_size", "largest_batch"):
        if getattr(schedule, name) is not None:
            _check_positive_integer(name, getattr(schedule, name))
    lengths = {"epochs": schedule.epochs, "num_steps": schedule.num_steps}
    given = [length for length in lengths.values() if length is not None]
    require(len(given) == 1, "epochs", "exactly one of epochs and num_steps", lengths)


def check_together(options: PrivacyOptions) -> None:
    """Check for contradictions that take all the options to see."""
    _check_positive_integer("dataset_size", options.dataset_size)
    size, batch, most = options.dataset_size, options.expected_batch_size, options.largest_batch
    expected = f"at most dataset_size = {size}"
    why = "the sampling probability cannot exceed 1"
    require(batch <= size, "expected_batch_size", expected, batch, why)
    expected = "from expected_batch_size to less than dataset_size"
    why = "without it batches are as large as they are drawn"
    require(most is None or batch <= most < size, "largest_batch", expected, most, why)
    poisson, follows = options.sampling == "poisson", options.clip_quantile is not None
    counted = options.accounting == "certified" and not options.budget and poisson
    clashes = (
        (
            most is not None and not counted,
            *("largest_batch", "accounting budget sampling"),
            "accounting='certified' without a budget file: no other accountant knows of it",
        ),
        (
            options.noise == "banded" and (not poisson or follows or most is not None),
            *("noise='banded'", "sampling largest_batch clip_quantile"),
            "sampling='poisson', with neither: nothing is proven for both",
        ),
        (
            options.clip == "none" and options.epsilon is not None,
            *("clip='none'", "epsilon", "a clip that bounds each record's contribution"),
        ),
        (
            not poisson and options.epsilon is not None,
            *("epsilon", "sampling", "sampling='poisson'"),
        ),
        (follows and options.clip != "flat", "clip_quantile", "clip", "flat"),
        (
            options.records_per_unit and (not poisson or options.loss_reduction != "sum"),
            *("records_per_unit", "sampling loss_reduction"),
            "sampling='poisson' and one loss for each record",
        ),
    )
    for contradicts, one, others, wanted in clashes:
        if contradicts:
            raise _clash(one, options, others, wanted)
    seeded, secure = options.seed is not None, options.secure
    why = "a seed lets its holder remove the noise"
    require(not (seeded and secure), "secure", "True or a seed, not both", secure, why)
    require(seeded or secure is not False, "seed", "a seed with secure=False", None)


def _check_positive_integer(name: str, value: int) -> None:
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(fine, name, "a positive integer", value)


def _clash(one: str, options: Budget, others: str, wanted: str) -> InvalidArgumentError:
    """An option that contradicts the `others`, whose names are given with spaces between."""
    got = ", ".join(f"{name}={getattr(options, name)!r}" for name in others.split())
    return InvalidArgumentError(one, expected=wanted, got=got, remedy="the two contradict")
