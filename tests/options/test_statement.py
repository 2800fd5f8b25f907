"""Every option is stated once: whoever repeats its name has its type, default and help."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any, get_args, get_type_hints

import pytest

from shuffled_dpsgd.cli import privacy_options as flags
from shuffled_dpsgd.clipping.contributions.cost import STRATEGIES
from shuffled_dpsgd.clipping.finalize.clip_functions import CLIP_FUNCTIONS
from shuffled_dpsgd.core.claim import Adjacency as AccountedAdjacency
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations import PrivacyArguments
from shuffled_dpsgd.options import (
    Adjacency,
    Budget,
    PrivacyOptions,
    Schedule,
    Scope,
    choices_of,
    help_of,
    options_in,
)
from shuffled_dpsgd.options.methods import OPEN
from shuffled_dpsgd.permutation.spec import Scope as MovableScope
from shuffled_dpsgd.tasks.config import PrivacyConfig, ScheduleConfig
from shuffled_dpsgd.training import PrivacyPlan, make_private

STATED = {item.name: item for item in fields(PrivacyOptions)}
TYPES = get_type_hints(PrivacyOptions)
VALID: dict[str, Any] = {
    "dataset_size": 100,
    "expected_batch_size": 10,
    "num_steps": 3,
    "delta": 1e-5,
    "epsilon": 1.0,
}


def default_of(name: str) -> object:
    default = STATED[name].default
    return inspect.Parameter.empty if default is MISSING else default


def test_make_private_takes_every_option_with_its_type_and_default() -> None:
    parameters = dict(inspect.signature(make_private).parameters)
    hints = get_type_hints(make_private)
    del parameters["model"], parameters["optimizer"]
    assert set(parameters) == set(STATED)
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert hints[name] == TYPES[name], name
        assert parameter.default == default_of(name), name


def test_make_private_documents_every_parameter() -> None:
    text = " ".join((make_private.__doc__ or "").split())
    for name in inspect.signature(make_private).parameters:
        assert f" {name}: " in text
    for name in STATED:
        assert f" {name}: {help_of(name)}" in text


@pytest.mark.parametrize("kind", [PrivacyArguments, PrivacyConfig, ScheduleConfig])
def test_sections_and_arguments_have_the_options_types_and_help(kind: Any) -> None:
    own = {
        (PrivacyArguments, "expected_batch_size"): int | None,  # the Trainer has a default for it
        # A file and the Trainer name a column; ids themselves are for calls.
        (PrivacyArguments, "unit"): str,
        (PrivacyConfig, "unit"): str,
    }
    shared = [item for item in fields(kind) if item.name in STATED]
    assert {item.name for item in fields(Schedule if kind is ScheduleConfig else Budget)} <= {
        item.name for item in shared
    }
    for item in shared:
        assert get_type_hints(kind)[item.name] == own.get((kind, item.name), TYPES[item.name])
        assert item.metadata["help"].startswith(help_of(item.name))


def test_defaults_differ_only_where_a_section_has_none() -> None:
    different = {
        (kind.__name__, item.name): item.default
        for kind in (PrivacyArguments, PrivacyConfig, ScheduleConfig)
        for item in fields(kind)
        if item.name in STATED and item.default != STATED[item.name].default
    }
    assert different == {
        ("PrivacyConfig", "clip_norm"): MISSING,
        ("PrivacyArguments", "expected_batch_size"): None,
    }


def test_a_plan_holds_options_under_their_names_and_types() -> None:
    hints = get_type_hints(PrivacyPlan)
    planned = {item.name for item in fields(PrivacyPlan)}
    assert planned - STATED.keys() == {"falls_back", "blocks", "noise_rows"}
    for name in planned & STATED.keys() - {"num_steps"}:
        if name == "shuffle":  # a plan knows what auto came to
            assert set(get_args(hints[name])) == set(choices_of(name)) - {"auto"}
            continue
        # A plan is made of options that have been filled in.
        assert hints[name] == (choices_type(name) if name in OPEN else TYPES[name]), name


def choices_type(name: str) -> Any:
    """The type of an option that may be left open, once it is filled in."""
    return next(kind for kind in get_args(TYPES[name]) if kind is not type(None))


def test_flags_have_the_options_help() -> None:
    shown = {
        name: metadata.help
        for name, alias in vars(flags).items()
        for metadata in getattr(alias, "__metadata__", ())
        if name != "Strategies"
    }
    assert len(shown) > 10
    assert set(shown.values()) <= {help_of(name) for name in STATED}


def test_choices_are_those_of_the_rooms_that_make_them() -> None:
    assert choices_of("clip") == tuple(CLIP_FUNCTIONS)
    assert set(choices_of("strategy")) == set(STRATEGIES)
    assert get_args(Scope) == get_args(MovableScope)
    assert get_args(Adjacency) == get_args(AccountedAdjacency)
    assert choices_of("epsilon") == ()


def test_help_is_one_line_without_markup() -> None:
    for name in STATED:
        assert help_of(name).endswith(".")
        assert not set("\n[]%") & set(help_of(name))


def test_options_are_frozen_and_read_back() -> None:
    options = PrivacyOptions(**VALID)
    with pytest.raises(FrozenInstanceError):
        options.delta = 0.1  # type: ignore[misc]
    assert PrivacyOptions(**options_in(options)) == options
    assert options_in(PrivacyArguments(delta=1e-5, epsilon=1.0, noise_seed=3)).get("seed") is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scope": "half"}, "scope"),
        ({"clip": "round"}, "clip"),
        ({"strategy": "magic"}, "strategy"),
        ({"loss_reduction": "max"}, "loss_reduction"),
        ({"physical_batch_size": 0}, "physical_batch_size"),
        ({"dataset_size": None}, "dataset_size"),
        ({"clip_norm": float("nan")}, "clip_norm"),
    ],
)
def test_bad_options_are_refused_when_they_are_made(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        PrivacyOptions(**(VALID | changes))


def test_an_epsilon_that_only_noise_meets_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 1e-06"):
        PrivacyOptions(**(VALID | {"epsilon": 1e-9}))
