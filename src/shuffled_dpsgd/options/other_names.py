"""Hints for keywords of other libraries: what the same option is called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from shuffled_dpsgd.errors import InvalidArgumentError

P = ParamSpec("P")
T = TypeVar("T")

_LOADER = "dataset_size and expected_batch_size here; the data go to private.batches(loader)"
_FOLLOWS = "not needed: clip_quantile brings its own"
OTHER_NAMES = {
    "module": "model, the first argument",
    "data_loader": _LOADER,
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "max_grad_norm": "clip_norm",
    "l2_norm_clip": "clip_norm",
    "per_example_max_grad_norm": "clip_norm",
    "sigma": "noise_multiplier",
    "criterion": "loss, a function of the model and a batch that returns one loss per record",
    "batch_size": "expected_batch_size",
    "sample_size": "dataset_size",
    "sample_rate": "expected_batch_size / dataset_size",
    "steps": "num_steps",
    "total_steps": "num_steps",
    "num_epochs": "epochs",
    "max_physical_batch_size": "physical_batch_size",
    "clipping": "clip",
    "poisson_sampling": "sampling",
    "grad_sample_mode": "not needed: the model is not wrapped; strategy chooses how clips are made",
    "batch_first": "not needed: the model is not wrapped",
    "noise_generator": "seed",
    "secure_mode": "not needed: noise is cryptographically secure unless a seed is given",
    "secure_rng": "not needed: noise is cryptographically secure unless a seed is given",
    "accountant": "accounting",
    "noise_scheduler": "one run for each noise on the same model, whose card prices all together",
    "grad_clip_scheduler": "private.set_clip_norm(c), called between steps",
    "target_unclipped_quantile": "clip_quantile",
    "clipbound_learning_rate": _FOLLOWS,
    "unclipped_num_std": _FOLLOWS,
    "min_clipbound": _FOLLOWS,
    "max_clipbound": _FOLLOWS,
}


def answers_other_names(function: Callable[P, T]) -> Callable[P, T]:
    """Name the right keyword where a wrong one is known, or close to one of the function's own.

    Raises:
        InvalidArgumentError: instead of a TypeError.
    """
    own = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def answering(*args: P.args, **kwargs: P.kwargs) -> T:
        found = {name: OTHER_NAMES.get(name) or _close(name, own) for name in kwargs}
        answers = {n: answer for n, answer in found.items() if n not in own and answer}
        if answers:
            raise InvalidArgumentError(
                ", ".join(answers),
                expected="a keyword of this library",
                got="another name",
                remedy="; ".join(f"{name} is {answer}" for name, answer in answers.items()),
            )
        return function(*args, **kwargs)

    return answering


def _close(name: str, own: tuple[str, ...]) -> str:
    return next(iter(get_close_matches(name, own, n=1)), "")
