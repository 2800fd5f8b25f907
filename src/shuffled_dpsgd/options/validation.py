"""What is refused of the options: values out of range, and values that contradict each other.

Each check takes the part of the options it can judge, so that a section of a file is refused as
soon as it is read. Contradictions are refused, never resolved silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING

from shuffled_dpsgd.errors import InvalidArgumentError
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
    """Every option that is a choice has one of the values listed for it."""
    for name, allowed in choices.items():
        value = getattr(options, name)
        may_be_open = name in OPEN or name == "method"
        _demand(
            value in allowed or (value is None and may_be_open), name, f"one of {allowed}", value
        )


def check_budget(budget: Budget) -> None:
    """ε, δ, noise and clips are in range, and say the same thing once."""
    for name, (least, most, expected) in _RANGES.items():
        value = getattr(budget, name)
        if value is None and name not in _REQUIRED:
            continue
        _demand(isinstance(value, Real) and not isinstance(value, bool), name, "a number", value)
        _demand(least <= value <= most, name, expected, value)
    epsilon, noise = budget.epsilon, budget.noise_multiplier
    _demand(
        (epsilon is None) != (noise is None),
        "epsilon",
        "exactly one of epsilon and noise_multiplier",
        {"epsilon": epsilon, "noise_multiplier": noise},
        "epsilon calibrates the noise, noise_multiplier fixes it",
    )
    _demand(
        epsilon is None or epsilon >= _LEAST_EPSILON,
        "epsilon",
        f"at least {_LEAST_EPSILON:g}",
        epsilon,
        "under so much noise nothing is learned, and no accountant is exact; leave the records "
        "out instead",
    )
    if isinstance(budget.unit, str):
        expected = "a name for what one row is, such as patient"
        _demand(budget.unit.strip(), "unit", expected, budget.unit)
    else:
        ids = "a name for what one row is, unless records_per_unit goes with it"
        _demand(budget.records_per_unit is not None, "unit", ids, type(budget.unit).__name__)
    if budget.records_per_unit is not None:
        _check_positive_integer("records_per_unit", budget.records_per_unit)
        _demand(
            budget.budget is None,
            "budget",
            "nothing with records_per_unit: the file counts runs on rows, not on units",
            budget.budget,
        )
        if budget.unit == "row" or budget.method == "opacus":
            raise _clash(
                "records_per_unit",
                "unit='row'" if budget.unit == "row" else "method='opacus'",
                "unit= the column or the list that says whose a record is, and our own engine",
            )
    _demand(
        math.isfinite(budget.clip_norm) or noise == 0.0,
        "clip_norm",
        "a finite number, unless noise_multiplier=0",
        budget.clip_norm,
        "noise is scaled by clip_norm",
    )
    _check_banded(budget)
    if budget.noise_frame == "unshuffled" and budget.shuffle != "every-step":
        raise _clash("noise_frame='unshuffled'", f"shuffle={budget.shuffle!r}", "every-step")
    if budget.clip_quantile is not None:
        _demand(math.isfinite(budget.clip_norm), "clip_norm", "a clip to start from", math.inf)
        # Noise that comes back in a later step would come back at another clip.
        for name, wanted in (("noise_frame", "shuffled"), ("noise", "independent")):
            if getattr(budget, name) != wanted:
                raise _clash("clip_quantile", f"{name}={getattr(budget, name)!r}", wanted)
        if budget.accounting == "paper":
            raise _clash("clip_quantile", "accounting='paper'", "certified or rdp")
    _check_paper(budget)


def _check_banded(budget: Budget) -> None:
    """Banded noise is certified, in no file of runs, and has blocks of two steps at least."""
    if budget.noise != "banded":
        _demand(budget.bands is None, "bands", "nothing without noise='banded'", budget.bands)
        return
    if budget.bands is not None:
        _demand(
            isinstance(budget.bands, int) and budget.bands >= 2, "bands", "2 or more", budget.bands
        )
    if budget.accounting != "certified" or budget.budget is not None:
        raise _clash(
            "noise='banded'",
            f"accounting={budget.accounting!r}, budget={budget.budget!r}",
            "accounting='certified' without a budget file, which counts independent steps",
        )
    _demand(
        budget.epsilon is not None or budget.bands is not None,
        "bands",
        "a number of steps with noise_multiplier; with epsilon it is chosen",
        None,
    )


def _check_paper(budget: Budget) -> None:
    """The paper's formula has what it needs, and what only it uses is given with it alone."""
    by_paper = budget.accounting == "paper"
    _demand(
        not by_paper or budget.batch_clip_norm is not None,
        "batch_clip_norm",
        "an explicit value with accounting='paper'",
        None,
        "the paper's formula depends on it more than on anything else",
    )
    if by_paper and budget.shuffle == "off":
        raise _clash("accounting='paper'", "shuffle='off'", "every-step or at-release")
    two = by_paper and budget.noise_multiplier is not None
    _demand(
        two == (budget.unshuffled_noise_multiplier is not None),
        "unshuffled_noise_multiplier",
        "a value exactly when accounting='paper' and noise_multiplier is given",
        budget.unshuffled_noise_multiplier,
        "Algorithm 1 needs sigma for the shuffled block and sigma_0 for the rest",
    )


def check_schedule(schedule: Schedule) -> None:
    """Sizes are positive, and the length is given once."""
    _check_positive_integer("expected_batch_size", schedule.expected_batch_size)
    for name in ("epochs", "num_steps", "physical_batch_size", "largest_batch"):
        if getattr(schedule, name) is not None:
            _check_positive_integer(name, getattr(schedule, name))
    lengths = {"epochs": schedule.epochs, "num_steps": schedule.num_steps}
    given = [length for length in lengths.values() if length is not None]
    _demand(len(given) == 1, "epochs", "exactly one of epochs and num_steps", lengths)


def check_together(options: PrivacyOptions) -> None:
    """What only all the options together can contradict."""
    _check_positive_integer("dataset_size", options.dataset_size)
    _demand(
        options.expected_batch_size <= options.dataset_size,
        "expected_batch_size",
        f"at most dataset_size = {options.dataset_size}",
        options.expected_batch_size,
        "the sampling probability cannot exceed 1",
    )
    most = options.largest_batch
    if most is not None:
        _demand(
            options.expected_batch_size <= most < options.dataset_size,
            "largest_batch",
            "from expected_batch_size to less than dataset_size",
            most,
            "without it batches are as large as they are drawn",
        )
        if options.accounting != "certified" or options.budget or options.sampling != "poisson":
            raise _clash(
                "largest_batch",
                f"accounting={options.accounting!r}, budget={options.budget!r}, "
                f"sampling={options.sampling!r}",
                "accounting='certified' without a budget file: no other accountant knows of it",
            )
    others = (options.sampling, most, options.clip_quantile)
    if options.noise == "banded" and others != ("poisson", None, None):
        raise _clash(
            "noise='banded'",
            f"sampling={options.sampling!r}, largest_batch={most}, "
            f"clip_quantile={options.clip_quantile}",
            "sampling='poisson', with neither: nothing is proven for both",
        )
    if options.clip == "none" and options.epsilon is not None:
        raise _clash("clip='none'", "epsilon", "a clip that bounds each record's contribution")
    if options.sampling == "unaccounted" and options.epsilon is not None:
        raise _clash("epsilon", "sampling='unaccounted'", "sampling='poisson'")
    if options.clip_quantile is not None and options.clip != "flat":
        raise _clash("clip_quantile", f"clip={options.clip!r}", "flat")
    if options.records_per_unit and (
        options.sampling != "poisson" or options.loss_reduction != "sum"
    ):
        raise _clash(
            "records_per_unit",
            f"sampling={options.sampling!r}, loss_reduction={options.loss_reduction!r}",
            "sampling='poisson' and one loss for each record",
        )
    if options.seed is not None and options.secure:
        raise _clash("secure=True", "seed", "one of them: a seed lets its holder remove the noise")
    _demand(
        options.seed is not None or options.secure is not False,
        "seed",
        "a seed with secure=False",
        None,
    )


def _check_positive_integer(name: str, value: int) -> None:
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _demand(fine, name, "a positive integer", value)


def _demand(holds: object, name: str, expected: str, got: object, remedy: str = "") -> None:
    if not holds:
        raise InvalidArgumentError(name, expected=expected, got=got, remedy=remedy)


def _clash(one: str, other: str, wanted: str) -> InvalidArgumentError:
    return InvalidArgumentError(one, expected=wanted, got=other, remedy="the two contradict")
