"""Sums formed and scattered a few layers at a time are the sums formed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.reference import clipped_sum_reference
from shuffled_dpsgd.errors import InvalidArgumentError


class OneOfTwo:
    """Stands for the sharding of a model over two ranks, the other of which has no samples."""

    ranks = 2
    modules: tuple[nn.Module, ...] = ()
    computed_in: frozenset[torch.dtype] = frozenset()
    split = None

    def __init__(self) -> None:
        self.scattered: list[dict[str, torch.Size]] = []
        self.waited_for: list[int] = []

    def is_any(self, flag: bool) -> bool:
        return flag

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gradients_to(self, take: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def reshard(self) -> None: ...

    def scatter(self, sums: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        self.scattered.append({name: total.shape for name, total in sums.items()})
        found = {name: total.clone() for name, total in sums.items()}

        def wait() -> dict[str, Tensor]:
            self.waited_for.append(len(self.scattered))
            return found

        return wait


class Tied(nn.Module):
    """An embedding that is also the head, layer norms and a block between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        found: Tensor = self.head(x)
        return found


def make(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tied().to(dtype), torch.randint(11, (5, 4))


def losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1]
    found = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return found.mean(1)


def sums_of(
    model: nn.Module, ids: Tensor, sharding: Any = None, **options: Any
) -> dict[str, Tensor]:
    engine = ClippingEngine(model, clip_norm=0.3, sharding=sharding, **options)
    for part in (ids[:3], ids[3:]):
        with engine:
            engine.backward(losses_of(model, part))
    return engine.clipped_sum()


@pytest.mark.parametrize("strategy", ["bookkeeping", "mixed", "instantiate"])
@pytest.mark.parametrize("clip", ["flat", "automatic", "per-layer"])
def test_the_same_sums_layer_by_layer(clip: str, strategy: str) -> None:
    model, ids = make()
    expected = sums_of(model, ids, clip=clip, strategy=strategy)
    found = sums_of(model, ids, OneOfTwo(), clip=clip, strategy=strategy)
    assert found.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-12, atol=1e-14)


def test_the_sums_are_those_of_single_samples() -> None:
    model, ids = make()
    found = sums_of(model, ids, OneOfTwo())
    expected = clipped_sum_reference(
        model, lambda m, one: losses_of(m, one[None]).sum(), ids, clip_norm=0.3
    )
    for name, total in expected.clipped_sum.items():
        torch.testing.assert_close(found[name], total, rtol=1e-9, atol=1e-12)


def test_no_bucket_is_larger_than_the_largest_layer_and_none_is_left_out() -> None:
    """All ranks scatter the same, also what this rank has no gradients for."""
    model, ids = make()
    sharding = OneOfTwo()
    sums_of(model, ids, sharding)
    names = [name for sums in sharding.scattered for name in sums]
    assert sorted(names) == sorted(2 * [name for name, _ in model.named_parameters()])
    assert len(sharding.scattered) > 2
    sizes = [sum(shape.numel() for shape in sums.values()) for sums in sharding.scattered]
    assert max(sizes) == 66, "the table"
    # Two batches. What is sent is waited for when the next is on its way, and at the end.
    half = len(sharding.scattered) // 2
    one = [*range(2, half + 1), half]
    assert sharding.waited_for == [*one, *(half + number for number in one)]


def test_a_batch_in_which_nothing_counts_adds_nothing() -> None:
    model, ids = make()
    engine = ClippingEngine(model, clip_norm=0.3, sharding=OneOfTwo())
    with engine:
        engine.backward(losses_of(model, ids))
    before = {name: total.clone() for name, total in engine.clipped_sum().items()}
    engine.expect_samples(any_count=False)
    with engine:
        engine.backward(losses_of(model, ids[:1]), counted=0)
    assert engine.sample_norms.numel() == len(ids)
    assert all(torch.equal(engine.clipped_sum()[name], before[name]) for name in before)
    engine.expect_samples(any_count=True)
    with engine, pytest.raises(InvalidArgumentError, match="from 1 to 1"):
        engine.backward(losses_of(model, ids[:1]), counted=0)


def test_half_copies_of_weights_do_not_wait_for_the_backward() -> None:
    """And the sums are the same bits as with copies that do."""
    model, ids = make(torch.float32)
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    found: dict[bool, dict[str, Tensor]] = {}
    kept: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    for sharded in kept:
        engine = ClippingEngine(
            model, clip_norm=0.3, sharding=OneOfTwo() if sharded else None, check_rate=0.0
        )

        def note(tensor: Tensor, seen: set[tuple[int, ...]] = kept[sharded]) -> Tensor:
            if tensor.dtype is torch.bfloat16:
                seen.update({tuple(tensor.shape), tuple(tensor.shape)[::-1]})
            return tensor

        # The checks of the first batch run the model with copies of their own.
        for watched in (False, True):
            engine.reset()
            with engine:
                hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
                with hooks if watched else nullcontext(), torch.autocast("cpu", torch.bfloat16):
                    losses = losses_of(model, ids)
                engine.backward(losses)
        found[sharded] = engine.clipped_sum()
    assert shapes & kept[False]
    assert not shapes & kept[True]
    for name, total in found[False].items():
        assert torch.equal(found[True][name], total)


def test_a_batch_that_was_added_half_way_is_not_counted_twice() -> None:
    class Failing(OneOfTwo):
        def scatter(self, sums: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
            if len(self.scattered) == 1:
                raise MemoryError("out of memory")
            return super().scatter(sums)

    model, ids = make()
    with (engine := ClippingEngine(model, sharding=Failing())), pytest.raises(MemoryError):
        engine.backward(losses_of(model, ids))
    with pytest.raises(InvalidArgumentError, match=r"reset\(\)"):
        engine.clipped_sum()
    with engine, pytest.raises(InvalidArgumentError, match=r"reset\(\)"):
        engine.backward(losses_of(model, ids))
    engine.reset()
    assert not any(total.any() for total in engine.clipped_sum().values())
