"""Finds out where the inputs of every layer have the batch, and refuses what has it nowhere.

Some inputs have no batch axis: the ids of a table of positions, of shape (T,), or a table (T, D)
that goes through a linear map. Their gradient arrives already summed over the samples. Where T
differs from the batch size, the shapes show it. Where T happens to equal the batch size, nothing
shows it, and the clipping would be silently wrong. So a few samples of every new kind of batch are
run twice without gradients, once as they are and once with one sample added. Inputs that carry the
batch grow. All others do not.

Some models fold the batch into another axis. There the number of rows of a sample is counted, and
the count must be right every time. So such a model is run with the whole batch, for every new
shape, and again once its samples have different lengths.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shuffled_dpsgd.clipping.capture.batch_size import first_tensor, shapes_beside_batch
from shuffled_dpsgd.clipping.capture.samples import are_ragged
from shuffled_dpsgd.clipping.capture.slot import ONE_FOR_ALL, Slot
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot
from shuffled_dpsgd.clipping.rules.trial_runs import buffers_kept, in_eval_mode
from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.replay import BatchedInputs

# Samples that are enough to see how inputs grow.
_FEW = 8


class Given(NamedTuple):
    """The first input of a call: the length of the axis that should be the batch, and its axes."""

    length: int
    axes: int
    is_single: bool = False  # One number alone.


# What each slot is given, call by call; nothing for a call without inputs.
Calls = dict[int, list[Given]]


class Growth(Enum):
    """What becomes of the length of an input when the batch has one sample more."""

    BATCH = "it is the batch"
    FOLDED = "it is a multiple of the batch"
    ONE = "it stays one"
    NONE = "it stays as it is"
    OTHER = "it changes otherwise"


class BatchAxisCheck:
    """Checks the batch axis on every kind of batch not seen before; `folds` once any input does."""

    def __init__(self, model: nn.Module, slots: Sequence[Slot]) -> None:
        self.folds = False
        # The kinds that were checked, with the rows a sample then has in calls of folded slots.
        self._known: dict[Hashable, dict[int, tuple[int, ...]]] = {}
        # What was found out of every slot, call by call.
        self._found: dict[int, list[Growth]] = {}
        self._model = model
        self._slots = slots

    def is_due(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> bool:
        """Whether a batch of `size` and of this kind would show what no batch has shown yet."""
        return size > 0 and self._key(args, kwargs, size, kind) not in self._known

    def run(
        self,
        args: Any,
        kwargs: Mapping[str, Any],
        size: int,
        kind: Hashable,
        late: bool = False,
    ) -> None:
        """Probe the model with the inputs of a batch of `size` samples.

        It is `late` if the batch itself has been run before.

        Raises:
            UnsupportedModuleError: a layer's input does not grow with the batch, or the model
                cannot be run with one sample more.
        """
        given: Calls | None = None
        if size > _FEW and not self.folds:
            some = BatchedInputs().take(args, kwargs, size, range(_FEW))
            try:
                given = self._check(*some, _FEW, size, late)
            except (RuntimeError, ValueError, IndexError):
                given = None  # A model may have been made for batches of one size.
        if given is None or self.folds:
            given = self._check(args, kwargs, size, size, late)
        self._known[self._key(args, kwargs, size, kind)] = {
            slot.index: self._rows(slot.index, given, size) for slot in self._slots if slot.folded
        }

    def expect(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> None:
        """Tell folded slots how many rows a sample has in inputs of these shapes."""
        if size > 0 and self.folds:
            key = self._key(args, kwargs, size, kind)
            for slot in self._slots:
                slot.layout.rows = self._known[key].get(slot.index)

    @property
    def shared(self) -> list[Slot]:
        """Slots that compute something once for all samples."""
        kinds = {Growth.ONE, Growth.NONE}
        return [s for s in self._slots if kinds & {*self._found.get(s.index, [])}]

    def _key(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> Hashable:
        if not self.folds:
            return kind
        return kind, shapes_beside_batch(args, kwargs, size), are_ragged(args, kwargs, size)

    def _rows(self, index: int, calls: Calls, size: int) -> tuple[int, ...]:
        """The rows a sample had in each of a slot's calls; empty if calls come and go."""
        given, found = calls.get(index, []), self._found.get(index, [])
        if len(given) != len(found):
            return ()
        pairs = zip(given, found, strict=True)
        return tuple([ONE_FOR_ALL if g is Growth.ONE else x.length // size for x, g in pairs])

    def _check(
        self, args: Any, kwargs: Mapping[str, Any], size: int, whole: int, late: bool
    ) -> Calls:
        """Check `size` samples of a batch of `whole`; returns what the slots were given."""
        more = BatchedInputs().take(args, kwargs, size, [*range(size), 0])
        with in_eval_mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
            # An error of the model's own comes up here, and is raised as it is.
            before = self._find_calls(args, kwargs)
            try:
                after = self._find_calls(*more)
            except (RuntimeError, ValueError, IndexError) as error:
                raise UnsupportedModuleError(
                    "",
                    expected="a model that also runs with one sample more",
                    got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    remedy="give every input that belongs to samples a batch axis 0, and no "
                    "other input that length",
                ) from error
        _refuse_other_batch(after, size)
        found: dict[int, list[Growth]] = {}
        for slot in self._slots:
            given, then = before.get(slot.index, []), after.get(slot.index, [])
            found[slot.index] = _judge(slot, given, then, size, self._found.get(slot.index, []))
            if late and size > 1 and isinstance(slot, EmbeddingSlot):
                # Such ids may be a row for all samples, or positions by positions of one token.
                _refuse_late(slot, [call for call in given if call.is_single], whole)
            if Growth.NONE in found[slot.index]:
                if late and not slot.shared_by_batch:
                    _refuse_late(slot, given, whole)
                slot.layout.shared_by_batch = True
        self.folds = any(slot.folded for slot in self._slots)
        if self.folds:
            for slot in self._slots:
                if after.get(slot.index) == []:
                    raise _without_input(slot)
                # A mixture of experts may call a layer later that it has not called now.
                unseen = slot.may_fold and slot.index not in before
                slot.layout.folded = slot.folded or unseen
        self._found = found
        return before

    def _find_calls(self, args: Any, kwargs: Mapping[str, Any]) -> Calls:
        """What the slots are given in a forward."""
        calls: Calls = {}

        def note(slot: Slot, args: Any, kwargs: Any) -> None:
            noted = calls.setdefault(slot.index, [])
            if args and isinstance(args[0], PackedSequence):
                noted.append(Given(int(args[0].batch_sizes[0]), 3))
                return
            x = first_tensor(args, kwargs)
            if x is not None and x.dim() > slot.batch_axis:
                noted.append(Given(x.shape[slot.batch_axis], x.dim(), x.numel() == 1))

        with ExitStack() as hooks:
            for slot in self._slots:
                handle = slot.module.register_forward_pre_hook(
                    lambda _, args, kwargs, slot=slot: note(slot, args, kwargs), with_kwargs=True
                )
                hooks.callback(handle.remove)
            self._model.forward(*args, **kwargs)
        return calls


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


def _judge(
    slot: Slot, before: Sequence[Given], after: Sequence[Given], size: int, earlier: list[Growth]
) -> list[Growth]:
    """How a slot's inputs grow with the batch; marks the slot if they are folded.

    `earlier` is what an earlier batch showed. Lengths do not show in which order the rows of folded
    inputs come; norms do.

    Raises:
        UnsupportedModuleError: they grow in a way that no rule can handle.
    """
    if len(before) != len(after):
        # How often the slot is called depends on the samples. Only the second run is judged.
        before = [a._replace(length=size if a.length == size + 1 else a.length) for a in after]
    found: list[Growth] = []
    for was, is_now in zip(before, after, strict=True):
        growth = growth_of(was.length, is_now.length, size)
        if growth is Growth.ONE and is_now.axes == 1 and isinstance(slot, EmbeddingSlot):
            # A single position: ids of one axis have no room for both batch and tokens.
            growth = Growth.NONE
        if growth is Growth.OTHER or (growth is Growth.FOLDED and not slot.may_fold):
            raise slot.refuse_length(is_now.length, size + 1)
        found.append(growth)
    if Growth.NONE in found:
        if not isinstance(slot, EmbeddingSlot) or len({*found, *earlier}) > 1:
            stays = [given.length for given in after if given.length != size + 1]
            raise slot.refuse_length(min(stays, default=size + 1), size + 1)
    elif isinstance(slot, EmbeddingSlot) and slot.shared_by_batch and found:
        raise slot.refuse_length(after[0].length, size + 1)
    if Growth.FOLDED in found:
        slot.layout.folded = True
    return found


def _refuse_other_batch(after: Calls, size: int) -> None:
    given = [call for calls in after.values() for call in calls]
    if given and all(call.length == 1 for call in given):
        raise UnsupportedModuleError(
            "",
            expected=f"the first tensor of the call to be a batch of {size} samples",
            got="layers whose inputs all have length one",
            remedy="pass the samples first, other tensors after them; expand what all samples "
            "share before the first trainable layer",
        )


def _refuse_late(slot: Slot, given: Sequence[Given], size: int) -> None:
    """Refuse ids without batch axis that have already been looked up as if they had one.

    Raises:
        UnsupportedModuleError: they have.
    """
    if any(call.axes > 1 or call.length == size for call in given):
        raise UnsupportedModuleError(
            slot.path,
            expected="ids known to be shared by the batch before the model is compiled",
            got="ids that were taken for one row per sample",
            remedy="run one batch without torch.compile first",
        )


def _without_input(slot: Slot) -> UnsupportedModuleError:
    """Parameters without input get a row per sample; folded ones would need more."""
    return UnsupportedModuleError(
        slot.path,
        expected="an input that tells how many rows belong to a sample",
        got="none, in a model that folds its batch into another axis",
        remedy="freeze this module with requires_grad_(False)",
    )
