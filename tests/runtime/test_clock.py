"""Every moment belongs to one part."""

from __future__ import annotations

import time

import pytest

from shuffled_dpsgd.runtime.clock import OTHER, Clock


def test_parts_add_up_and_inner_ones_interrupt_outer_ones() -> None:
    clock = Clock()
    begin = time.perf_counter()
    clock.start()
    with clock.part("outer"):
        time.sleep(0.02)
        with clock.part("inner"):
            time.sleep(0.03)
    clock.turn_to("last")
    time.sleep(0.01)
    clock.stop()
    whole = time.perf_counter() - begin
    seconds = clock.seconds()
    assert set(seconds) == {OTHER, "outer", "inner", "last"}
    assert sum(seconds.values()) == pytest.approx(whole, abs=2e-3)
    assert seconds["inner"] >= 0.03
    assert seconds["outer"] >= 0.02
    assert seconds["last"] >= 0.01
    time.sleep(0.01)
    assert clock.seconds() == seconds


def test_a_clock_that_was_not_started_measures_nothing() -> None:
    clock = Clock()
    with clock.part("data"):
        clock.turn_to("noise")
    assert clock.seconds() == {}


def test_a_part_that_fails_ends() -> None:
    clock = Clock()
    clock.start()
    with pytest.raises(ValueError, match="no"), clock.part("data"):
        raise ValueError("no")
    clock.stop()
    assert set(clock.seconds()) == {OTHER, "data"}


def test_starting_again_begins_at_zero() -> None:
    clock = Clock()
    clock.start("first")
    clock.start("second")
    clock.stop()
    assert set(clock.seconds()) == {"second"}
