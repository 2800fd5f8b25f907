"""Generators that functions and objects hold are found, each module looked through once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shuffled_dpsgd.runtime.random_states import RandomStates, generators_in

BESIDE = np.random.default_rng(0)
SYSTEM = random.SystemRandom()


def plain(value: int) -> int:
    return value


def closing(over: Any) -> Callable[[], Any]:
    return lambda: over


def empty() -> Callable[[], Any]:
    def inner() -> Any:
        return later

    if SYSTEM.random() > 2.0:
        later = 1
    return inner


def test_generators_beside_functions_and_in_closures_are_found() -> None:
    held, own = torch.Generator(), random.Random(1)
    found = generators_in([{"one": plain, "two": closing(held), "three": [own]}], 2)
    assert {id(each) for each in found} == {id(each) for each in (BESIDE, held, own)}


def test_a_variable_that_is_not_bound_yet_holds_nothing() -> None:
    assert generators_in([empty()], 1) == [BESIDE]


def test_any_draw_is_seen() -> None:
    own = np.random.default_rng(1)
    draws: list[Callable[[], object]] = [
        lambda: torch.rand(1),
        random.random,
        np.random.random,
        own.random,
    ]
    for draw in draws:
        before = RandomStates.now([own])
        assert before.plain() == before.again().plain()
        draw()
        assert before.plain() != before.again().plain()
        assert (before.of_torch_alone() != before.again().of_torch_alone()) == (draw is draws[0])
        before.restore()
        assert before.plain() == before.again().plain()
