"""Draws are uniform and reproducible, and form a group."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from permutation.zoo import FAMILIES
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import (
    Block,
    Group,
    Member,
    Permutation,
    PermutationSpec,
    apply_to_tensors,
    discover,
    draw,
    from_groups,
    identity,
)

SPEC = discover(FAMILIES["llama"]().model, scope="full")
SEEDS = st.integers(min_value=0, max_value=2**63 - 1)


def drawn(seed: int, spec: PermutationSpec = SPEC) -> Permutation:
    return draw(spec, torch.Generator().manual_seed(seed))


def one_axis(size: int, *groups: Group) -> PermutationSpec:
    return PermutationSpec(scope="full", groups=groups, shapes={"w": (size,)}, unmoved={})


def group(size: int, block: Block) -> Group:
    member = Member(parameter="w", axis=0, block=block)
    return Group(name=f"of {size}", kind="heads", size=size, members=(member,))


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_every_index_vector_is_a_permutation(seed: int) -> None:
    permutation = drawn(seed)
    for layout, index in zip(SPEC.layouts, permutation.indices, strict=True):
        assert torch.equal(index.sort().values, torch.arange(layout.size))


@given(first=SEEDS, second=SEEDS, third=SEEDS)
@settings(max_examples=20, deadline=None)
def test_draws_form_a_group(first: int, second: int, third: int) -> None:
    a, b, c = drawn(first), drawn(second), drawn(third)
    nothing = identity(SPEC)
    assert torch.equal(a.then(a.inverse()).packed, nothing.packed)
    assert torch.equal(a.inverse().then(a).packed, nothing.packed)
    assert torch.equal(a.then(b).then(c).packed, a.then(b.then(c)).packed)
    assert torch.equal(a.then(b).inverse().packed, b.inverse().then(a.inverse()).packed)


@given(first=SEEDS, second=SEEDS)
@settings(max_examples=10, deadline=None)
def test_composition_is_one_after_the_other(first: int, second: int) -> None:
    a, b = drawn(first), drawn(second)
    generator = torch.Generator().manual_seed(0)
    once = {name: torch.randn(shape, generator=generator) for name, shape in SPEC.shapes.items()}
    twice = {name: tensor.clone() for name, tensor in once.items()}
    apply_to_tensors(a.then(b), once)
    apply_to_tensors(a, twice)
    apply_to_tensors(b, twice)
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_the_seed_decides() -> None:
    assert torch.equal(drawn(7).packed, drawn(7).packed)
    assert not torch.equal(drawn(7).packed, drawn(8).packed)


def test_draws_are_uniform() -> None:
    spec = one_axis(4, group(4, Block()))
    generator = torch.Generator().manual_seed(0)
    num_draws = 4800
    counts = Counter(tuple(draw(spec, generator).packed.tolist()) for _ in range(num_draws))
    expected = num_draws / 24
    chi_square = sum((counts[p] - expected) ** 2 / expected for p in permutations(range(4)))
    # 23 degrees of freedom: 49.7 is exceeded once in a thousand seeds; the seed is fixed.
    assert chi_square < 49.7


def test_blocks_stay_whole_and_reach_every_arrangement() -> None:
    """Two heads of two dimensions: 2! arrangements of heads times 2! inside each."""
    spec = one_axis(
        4,
        group(2, Block()),
        group(2, Block(start=2)),
        group(2, Block(width=2)),
    )
    generator = torch.Generator().manual_seed(0)
    seen = {tuple(draw(spec, generator).packed.tolist()) for _ in range(200)}
    assert len(seen) == 8
    assert all({row[0] // 2, row[1] // 2} in ({0}, {1}) for row in seen)


def test_groups_act_in_the_order_of_the_spec() -> None:
    spec = one_axis(4, group(2, Block()), group(2, Block(width=2)))
    swap = torch.tensor([1, 0])
    permutation = from_groups(spec, [swap, swap])
    letters = {"w": torch.tensor([10.0, 11.0, 12.0, 13.0])}
    apply_to_tensors(permutation, letters)
    assert letters["w"].tolist() == [12.0, 13.0, 11.0, 10.0]


def test_repeated_blocks_move_alike() -> None:
    spec = one_axis(6, group(3, Block(repeats=2, repeat_every=3)))
    index = from_groups(spec, [torch.tensor([2, 0, 1])]).packed
    assert index.tolist() == [2, 0, 1, 5, 3, 4]


def test_an_axis_that_does_not_move_has_no_index() -> None:
    permutation = drawn(0)
    assert permutation.index("model.embed_tokens.weight", 1).shape == (24,)
    with pytest.raises(InvalidArgumentError, match="an axis that moves"):
        permutation.index("model.embed_tokens.weight", 0)


def test_what_is_no_permutation_of_the_spec_is_refused() -> None:
    spec = one_axis(3, group(3, Block()))
    for wrong in ([], [torch.tensor([0, 0, 1])], [torch.arange(2)]):
        with pytest.raises(InvalidArgumentError, match="permutations"):
            from_groups(spec, wrong)
    with pytest.raises(InvalidArgumentError, match="same spec"):
        drawn(0).then(identity(spec))
