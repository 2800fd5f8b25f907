"""How the inputs of a layer grow with the batch: with it, as a multiple of it, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from shuffled_dpsgd.clipping.capture.batch_size import first_tensor
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot

# What each slot is given, call by call; nothing for a call without inputs.
Calls = dict[int, list["Given"]]


class Given(NamedTuple):
    """The first input of a call: the length of the axis that should be the batch, and its axes."""

    length: int
    axes: int


class Growth(Enum):
    """What becomes of the length of an input when the batch has one sample more."""

    BATCH = "it is the batch"
    FOLDED = "it is a multiple of the batch"
    ONE = "it stays one"
    NONE = "it stays as it is"
    OTHER = "it changes otherwise"


def growth_of(before: int, after: int, size: int) -> Growth:
    """The growth of an input from a batch of `size` to one of a sample more.

    >>> growth_of(3, 4, 3).name, growth_of(4, 4, 3).name, growth_of(15, 20, 3).name
    ('BATCH', 'NONE', 'FOLDED')
    """
    if (before, after) == (size, size + 1):
        return Growth.BATCH
    if before % size == 0 and before // size * (size + 1) == after:
        # Zero rows are a multiple too: an expert that received no token.
        return Growth.FOLDED
    if before == after:
        return Growth.ONE if after == 1 else Growth.NONE
    return Growth.OTHER


def fits(length: int, growth: Growth, size: int) -> bool:
    """Whether an input that grows so may have that length in a batch of `size`."""
    if growth is Growth.FOLDED:
        return length % size == 0
    return growth is Growth.NONE or length == (1 if growth is Growth.ONE else size)


def find_calls(
    model: nn.Module, slots: Sequence[Slot], args: Any, kwargs: Mapping[str, Any]
) -> Calls:
    """What the slots are given in a forward."""
    calls: Calls = {}
    with _watching(slots, calls):
        model.forward(*args, **kwargs)
    return calls


def judge_growth(
    slot: Slot,
    before: Sequence[Given],
    after: Sequence[Given],
    size: int,
    earlier: Sequence[tuple[Growth, int]],
) -> list[tuple[Growth, int]]:
    """How a slot's inputs grow with the batch; marks the slot if they are folded.

    `earlier` is what an earlier batch showed. Lengths do not show in which order the rows of folded
    inputs come; `row_check` compares the rows themselves.

    Raises:
        UnsupportedModuleError: they grow in a way that no rule can handle.
    """
    if len(before) != len(after):
        # How often the slot is called depends on the samples. Only the second run is judged.
        before = [a._replace(length=size if a.length == size + 1 else a.length) for a in after]
    found: list[tuple[Growth, int]] = []
    for was, is_now in zip(before, after, strict=True):
        growth = growth_of(was.length, is_now.length, size)
        if growth is Growth.ONE and is_now.axes == 1 and isinstance(slot, EmbeddingSlot):
            # A single position: ids of one axis have no room for both batch and tokens.
            growth = Growth.NONE
        if growth is Growth.OTHER or (growth is Growth.FOLDED and not slot.may_fold):
            raise slot.refuse_length(is_now.length, size + 1)
        found.append((growth, is_now.axes))
    growths = {growth for growth, _ in found}
    if Growth.NONE in growths:
        known = {growth for growth, _ in earlier}
        if not isinstance(slot, EmbeddingSlot) or len(growths | known) > 1:
            stays = [given.length for given in after if given.length != size + 1]
            raise slot.refuse_length(min(stays, default=size + 1), size + 1)
    elif isinstance(slot, EmbeddingSlot) and slot.shared_by_batch and found:
        raise slot.refuse_length(after[0].length, size + 1)
    if Growth.FOLDED in growths:
        slot.layout.folded = True
    return found


@contextmanager
def _watching(slots: Sequence[Slot], calls: Calls) -> Iterator[None]:
    with ExitStack() as hooks:
        for slot in slots:

            def note(_: nn.Module, args: Any, kwargs: Any, slot: Slot = slot) -> None:
                x = first_tensor(args, kwargs)
                noted = calls.setdefault(slot.index, [])
                if x is not None and x.dim() > slot.batch_axis:
                    noted.append(Given(x.shape[slot.batch_axis], x.dim()))

            handle = slot.module.register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(handle.remove)
        yield
