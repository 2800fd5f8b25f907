"""Loading ahead changes when items are made, never which, nor in what order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shuffled_dpsgd.training.background import loaded_ahead


def test_items_come_in_order_and_are_made_ahead() -> None:
    made: list[str] = []

    def items() -> Iterator[int]:
        for number in range(6):
            made.append(threading.current_thread().name)
            yield number

    found = loaded_ahead(items())
    assert next(found) == 0
    assert next(found) == 1
    end = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < end:
        time.sleep(0.001)
    assert len(made) >= 4
    assert list(found) == [2, 3, 4, 5]
    assert {name.partition("_")[0] for name in made[1:]} == {"loading ahead"}
    assert list(loaded_ahead(iter(()))) == []


def test_an_error_is_raised_where_its_item_was_due() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("record 3 is torn")

    found = loaded_ahead(items())
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="record 3 is torn"):
        next(found)


def test_a_loop_given_up_leaves_no_thread() -> None:
    found = loaded_ahead(iter(range(1000)))
    next(found), next(found)
    found.close()  # type: ignore[attr-defined]  # a generator
    assert not [t for t in threading.enumerate() if t.name.startswith("loading ahead")]


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1)])
def test_random_items_are_made_where_they_are_asked_for(draw: object) -> None:
    threads: list[str] = []

    def items() -> Iterator[object]:
        for _ in range(4):
            threads.append(threading.current_thread().name)
            yield draw()  # type: ignore[operator]

    assert len(list(loaded_ahead(items()))) == 4
    assert not [name for name in threads if name.startswith("loading ahead")]
