"""Lengths and distances of sketches are those of the vectors they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from shuffled_dpsgd.clipping.checks.sketches import distances, length, sketch, sketches_of


def test_lengths_and_distances_are_those_of_the_numbers() -> None:
    one = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([12.0]).double()}
    other = {"b": torch.tensor([10.0]).double(), "c": torch.tensor([0.0, 7.0]).double()}
    assert length(one) == 13.0
    assert length({}) == 0.0
    assert distances(one, other) == {"a": 5.0, "b": 2.0, "c": 7.0}
    assert distances({}, {}) == {}


def test_a_number_that_is_none_is_not_overlooked() -> None:
    one = {"a": torch.tensor([math.nan]).double(), "b": torch.tensor([1.0]).double()}
    assert math.isnan(length(one))
    assert math.isnan(distances(one, {})["a"])
    assert distances(one, {})["b"] == 1.0


def test_a_sketch_is_linear_and_about_as_long() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3000, 40, generator=generator, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(sketch(a + 2 * b), sketch(a) + 2 * sketch(b))
    assert abs(float(sketch(a).norm() / a.norm()) - 1) < 0.1
    assert torch.equal(sketch(a[0]), a[0])


@pytest.mark.parametrize("shape", [(), (7,), (512,), (30, 40), (8, 64)])
def test_several_at_once_have_the_sketches_they_have_alone(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
    found = sketches_of(tensors[1::3])
    torch.testing.assert_close(found, torch.stack([sketch(tensors[1]), sketch(tensors[4])]))
