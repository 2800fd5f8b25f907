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
_NUMBERS = ("epsilon", "noise_multiplier", "unshuffled_noise_multiplier", "batch_clip_norm")


def check_choices(options: object, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Every option that is a choice has one of the values listed for it."""
    for name, allowed in choices.items():
        value = getattr(options, name)
        may_be_open = name in OPEN or name == "method"
        if value not in allowed and not (value is None and may_be_open):
            raise InvalidArgumentError(name, expected=f"one of {allowed}", got=value)


def check_budget(budget: Budget) -> None:
    """ε, δ, noise and clips are in range, and say the same thing once."""
    _check_numbers(budget)
    _check_clips(budget)
    if not 0.0 < budget.delta < 1.0:
        raise InvalidArgumentError("delta", expected="a number in (0, 1)", got=budget.delta)
    if (budget.epsilon is None) == (budget.noise_multiplier is None):
        raise InvalidArgumentError(
            "epsilon",
            expected="exactly one of epsilon and noise_multiplier",
            got={"epsilon": budget.epsilon, "noise_multiplier": budget.noise_multiplier},
            remedy="epsilon calibrates the noise, noise_multiplier fixes it",
        )
    if budget.epsilon is not None and not 0.0 < budget.epsilon < math.inf:
        raise InvalidArgumentError("epsilon", expected="a positive number", got=budget.epsilon)
    if budget.epsilon is not None and budget.epsilon < _LEAST_EPSILON:
        raise InvalidArgumentError(
            "epsilon",
            expected=f"at least {_LEAST_EPSILON:g}",
            got=budget.epsilon,
            remedy="under so much noise nothing is learned, and no accountant is exact; leave the "
            "records out instead",
        )
    for name in ("noise_multiplier", "unshuffled_noise_multiplier"):
        value = getattr(budget, name)
        if value is not None and not 0.0 <= value < math.inf:
            raise InvalidArgumentError(name, expected="a non-negative number", got=value)
    if not isinstance(budget.unit, str) or not budget.unit.strip():
        raise InvalidArgumentError(
            "unit", expected="a name for what one row is, such as patient", got=budget.unit
        )
    if not 0.0 <= budget.check_rate <= 1.0:
        raise InvalidArgumentError(
            "check_rate", expected="a number from 0 to 1", got=budget.check_rate
        )
    if budget.noise_frame == "unshuffled" and budget.shuffle != "every-step":
        raise _clash("noise_frame='unshuffled'", f"shuffle={budget.shuffle!r}", "every-step")
    two = budget.accounting == "paper" and budget.noise_multiplier is not None
    if two != (budget.unshuffled_noise_multiplier is not None):
        raise InvalidArgumentError(
            "unshuffled_noise_multiplier",
            expected="a value exactly when accounting='paper' and noise_multiplier is given",
            got=budget.unshuffled_noise_multiplier,
            remedy="Algorithm 1 needs sigma for the shuffled block and sigma_0 for the rest",
        )


def check_schedule(schedule: Schedule) -> None:
    """Sizes are positive, and the length is given once."""
    _check_positive_integer("expected_batch_size", schedule.expected_batch_size)
    for name in ("epochs", "num_steps", "physical_batch_size"):
        if getattr(schedule, name) is not None:
            _check_positive_integer(name, getattr(schedule, name))
    if (schedule.epochs is None) == (schedule.num_steps is None):
        raise InvalidArgumentError(
            "epochs",
            expected="exactly one of epochs and num_steps",
            got={"epochs": schedule.epochs, "num_steps": schedule.num_steps},
        )


def check_together(options: PrivacyOptions) -> None:
    """What only all the options together can contradict."""
    _check_positive_integer("dataset_size", options.dataset_size)
    if options.expected_batch_size > options.dataset_size:
        raise InvalidArgumentError(
            "expected_batch_size",
            expected=f"at most dataset_size = {options.dataset_size}",
            got=options.expected_batch_size,
            remedy="the sampling probability cannot exceed 1",
        )
    if options.clip == "none" and options.epsilon is not None:
        raise _clash("clip='none'", "epsilon", "a clip that bounds each record's contribution")
    if options.sampling == "unaccounted" and options.epsilon is not None:
        raise _clash("epsilon", "sampling='unaccounted'", "sampling='poisson'")
    if options.seed is not None and options.secure:
        raise _clash("secure=True", "seed", "one of them: a seed lets its holder remove the noise")
    if options.seed is None and options.secure is False:
        raise InvalidArgumentError("seed", expected="a seed with secure=False", got=None)


def _check_numbers(budget: Budget) -> None:
    for name in ("delta", "clip_norm"):
        if getattr(budget, name) is None:
            raise InvalidArgumentError(name, expected="a number", got=None)
    for name in (*_NUMBERS, "delta", "clip_norm"):
        value = getattr(budget, name)
        if isinstance(value, bool) or not isinstance(value, Real | None):
            raise InvalidArgumentError(name, expected="a number", got=value)


def _check_clips(budget: Budget) -> None:
    if not budget.clip_norm > 0.0:
        raise InvalidArgumentError("clip_norm", expected="a positive number", got=budget.clip_norm)
    batch_clip = budget.batch_clip_norm
    if batch_clip is not None and not batch_clip > 0.0:
        raise InvalidArgumentError(
            "batch_clip_norm", expected="a positive number or None", got=batch_clip
        )
    if math.isinf(budget.clip_norm) and budget.noise_multiplier != 0.0:
        raise InvalidArgumentError(
            "clip_norm",
            expected="a finite number, unless noise_multiplier=0",
            got=budget.clip_norm,
            remedy="noise is scaled by clip_norm",
        )
    if budget.accounting == "paper":
        if batch_clip is None:
            raise InvalidArgumentError(
                "batch_clip_norm",
                expected="an explicit value with accounting='paper'",
                got=None,
                remedy="the paper's formula depends on it more than on anything else",
            )
        if budget.shuffle == "off":
            raise _clash("accounting='paper'", "shuffle='off'", "every-step or at-release")


def _check_positive_integer(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(name, expected="a positive integer", got=value)


def _clash(one: str, other: str, wanted: str) -> InvalidArgumentError:
    return InvalidArgumentError(one, expected=wanted, got=other, remedy="the two contradict")
