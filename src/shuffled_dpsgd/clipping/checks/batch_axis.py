"""Checks that the first axis of every layer's input really is the batch.

A table of positions looked up with ids of shape (T,), or a linear map of a (T, D) table, has no
batch axis: its gradient arrives already summed over the samples. Where T differs from the batch
size the shapes give that away; where it happens to be equal nothing does, and the clipping would
be silently wrong. So a few samples of the first batch are run twice, without gradients, as they are
and with one sample added: inputs that carry the batch grow, all others do not.

What was found may be an accident of the first batch: with a single token, (T, D) has one row like
something that is broadcast. So a few samples of every new kind of batch are run once without
gradients, and only where layers see other lengths than they should all is checked anew. Models that
fold the batch into another axis are checked anew for every shape, with the whole batch, and once
their samples come to have different lengths: how many rows belong to a sample is counted, and
counting must be right each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.capture.batch_size import find_batch, shapes_beside_batch
from shuffled_dpsgd.clipping.capture.random_tape import paused
from shuffled_dpsgd.clipping.capture.samples import are_ragged
from shuffled_dpsgd.clipping.capture.slot import ONE_FOR_ALL, Slot
from shuffled_dpsgd.clipping.checks.broadcast_inputs import check_shared
from shuffled_dpsgd.clipping.checks.changed_batches import (
    as_it_is,
    back_to_front,
    chosen,
    first_half,
    first_two,
    one_more,
    second_half,
)
from shuffled_dpsgd.clipping.checks.loss_independence import are_uneven
from shuffled_dpsgd.clipping.checks.row_identity import (
    NUMBERS,
    OUTPUTS,
    RowMarks,
    find_mixed_numbers,
    find_moved_rows,
    has_nan,
    moved_rows,
    repeats,
    rows_of,
)
from shuffled_dpsgd.clipping.checks.solo_runs import HostGenerators, dropout_silenced
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot
from shuffled_dpsgd.clipping.rules.trial_runs import (
    buffers_kept,
    in_eval_mode,
    without_fast_attention,
)
from shuffled_dpsgd.errors import UnsupportedModuleError

Change = Callable[[Any, int], Any]
# What each slot is given, call by call; nothing for a call without inputs.
Calls = dict[int, list["Given"]]
# Samples that are enough to see whether samples meet.
_MAX_ROWS = 8
# How many batches with a NaN among them are looked at before one has to do.
_MAX_HIDDEN = 8


class Given(NamedTuple):
    """The first input of a call, and how long its axis is that should be the batch."""

    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def axes(self) -> int:
        """How many axes the input has."""
        return len(self.shape)


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
        # No rows at all are a multiple, too: an expert that nobody was sent to.
        return Growth.FOLDED
    if before == after:
        return Growth.ONE if after == 1 else Growth.NONE
    return Growth.OTHER


class BatchAxisCheck:
    """Runs the check on the first batch, and that samples keep apart on the first of several.

    `mixed_numbers` says which single numbers among the outputs are then no sum or mean of losses,
    `has_numbers` whether there are any, and `saw_uneven` whether samples had different numbers of
    labels, without which a mean over tokens looks like one over samples. `on_calls` is told what
    the slots of a first batch are given, as soon as that is known.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        on_calls: Callable[[Calls], None] = lambda _: None,
    ) -> None:
        self.mixed_numbers: frozenset[int] = frozenset()
        self.has_numbers = False
        self.saw_uneven = False
        self._seen = 0
        # The kinds that were checked, with the rows a sample then has in calls of folded slots.
        self._known: dict[Hashable, dict[int, tuple[int, ...]]] = {}
        # Batches in which some number was NaN: they hide what the others of their kind would show.
        self._hidden = 0
        self._hiding: set[Hashable] = set()
        self._latest: Calls = {}
        # What was found out, call by call, and how many axes the input had.
        self._found: dict[int, list[tuple[Growth, int]]] = {}
        self._model = model
        self._slots = slots
        self._on_calls = on_calls

    def is_due(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> bool:
        """Whether a batch of `size` and of this kind would show what no batch has shown yet."""
        if min(size, 2) > self._seen:
            return True
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
            UnsupportedModuleError: a layer's input does not grow with the batch, samples change
                places or see each other, or the model cannot be run with one sample more.
        """
        hidden = self._hidden
        is_first = min(size, 2) > self._seen
        if is_first or self._folds() or not self._is_as_before(args, kwargs, size):
            self._check(args, kwargs, size, late)
            if hidden < self._hidden <= _MAX_HIDDEN:
                self._hiding.add(self._key(args, kwargs, size, kind))
                self._remember(args, kwargs, size, kind)
                return
            self._seen = max(self._seen, min(size, 2))
        self._remember(args, kwargs, size, kind)

    def _folds(self) -> bool:
        return any(slot.folded for slot in self._slots)

    def _key(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> Hashable:
        if not self._folds():
            return kind
        return kind, shapes_beside_batch(args, kwargs, size), are_ragged(args, kwargs, size)

    def _remember(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> None:
        self._known[self._key(args, kwargs, size, kind)] = {
            slot.index: self._rows(slot.index, size) for slot in self._slots if slot.folded
        }

    def _rows(self, index: int, size: int) -> tuple[int, ...]:
        """The rows a sample had in a slot's latest calls; none if nobody can know the next ones."""
        given, found = self._latest.get(index, []), self._found.get(index, [])
        if len(given) != len(found):
            return ()
        pairs = zip(given, found, strict=True)
        return tuple([ONE_FOR_ALL if g is Growth.ONE else x.length // size for x, (g, _) in pairs])

    def expect(self, args: Any, kwargs: Mapping[str, Any], size: int, kind: Hashable) -> None:
        """Tell folded slots how many rows a sample has in inputs of these shapes."""
        if size > 0 and self._folds():
            key = self._key(args, kwargs, size, kind)
            for slot in self._slots:
                slot.layout.rows = self._known[key].get(slot.index)
            if key in self._hiding:
                del self._known[key]
                self._hiding.discard(key)

    def _is_as_before(self, args: Any, kwargs: Mapping[str, Any], size: int) -> bool:
        """Whether every layer sees the lengths it should, by what was found before."""
        args, kwargs, size = _few(args, kwargs, size)
        with in_eval_mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
            calls = self._latest = self._calls(args, kwargs)
        for index, given in calls.items():
            found = self._found.get(index, [])
            if len(given) != len(found):
                return False
            for call, (growth, axes_before) in zip(given, found, strict=True):
                if call.axes != axes_before or not _fits(call.length, growth, size):
                    return False
        return True

    def _check(self, args: Any, kwargs: Mapping[str, Any], size: int, late: bool) -> None:
        """On a few samples of the batch, unless the model folds it, or takes no smaller one."""
        few_args, few_kwargs, few = _few(args, kwargs, size)
        if few < size and not self._folds():
            try:
                self._check_these(few_args, few_kwargs, few, size, late)
            except (RuntimeError, ValueError, IndexError):
                # A model may have been made for batches of one size.
                self._check_these(args, kwargs, size, size, late)
                return
            if not self._folds():
                return
        self._check_these(args, kwargs, size, size, late)

    def _check_these(
        self, args: Any, kwargs: Mapping[str, Any], size: int, whole: int, late: bool
    ) -> None:
        """Check `size` samples of a batch of `whole`."""
        more_args, more_kwargs = one_more(args, size), one_more(dict(kwargs), size)
        with in_eval_mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
            # An error of the model's own comes up here, and is raised as it is.
            before = self._latest = self._calls(args, kwargs)
            self._on_calls(before)
            try:
                after = self._calls(more_args, more_kwargs)
            except (RuntimeError, ValueError, IndexError) as error:
                raise UnsupportedModuleError(
                    "",
                    expected="a model that also runs with one sample more",
                    got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    remedy="give every input that belongs to samples a batch axis 0, and no "
                    "other input that length",
                ) from error
            self._refuse_other_batch(after, size)
            found: dict[int, list[tuple[Growth, int]]] = {}
            for slot in self._slots:
                given = before.get(slot.index, [])
                found[slot.index] = self._judge(slot, given, after.get(slot.index, []), size)
                if Growth.NONE in {growth for growth, _ in found[slot.index]}:
                    if late and not slot.shared_by_batch:
                        _refuse_late(slot, given, whole)
                    slot.layout.shared_by_batch = True
            if any(slot.folded for slot in self._slots):
                self._refuse_without_input(after)
                for slot in self._slots:
                    # Where tokens are sent to some layers only, one may be called later on.
                    unseen = slot.may_fold and slot.index not in before
                    slot.layout.folded = slot.folded or unseen
            self._check_shared(found, more_args, more_kwargs, size + 1)
        if size > 1:
            self._check_rows(args, kwargs, size)
        self._found = found

    def _calls(self, args: Any, kwargs: Mapping[str, Any]) -> Calls:
        """What the slots are given in a forward."""
        calls: Calls = {}
        with self._watching(calls):
            self._model.forward(*args, **kwargs)
        return calls

    def _refuse_other_batch(self, after: Calls, size: int) -> None:
        given = [call for calls in after.values() for call in calls]
        if given and all(call.length == 1 for call in given):
            raise UnsupportedModuleError(
                "",
                expected=f"the first tensor of the call to be a batch of {size} samples",
                got="layers whose inputs all have length one",
                remedy="pass the samples first, other tensors after them; expand what all samples "
                "share before the first trainable layer",
            )

    def _judge(
        self, slot: Slot, before: Sequence[Given], after: Sequence[Given], size: int
    ) -> list[tuple[Growth, int]]:
        """How a slot's inputs grow; notes that they are folded.

        In which order the rows of folded inputs come lengths cannot tell; the rows themselves will.

        Raises:
            UnsupportedModuleError: they grow as none should.
        """
        if len(before) != len(after):
            # A model that calls it as the samples require; one of the runs must do.
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
            known = {growth for growth, _ in self._found.get(slot.index, [])}
            if not isinstance(slot, EmbeddingSlot) or len(growths | known) > 1:
                stays = [given.length for given in after if given.length != size + 1]
                raise slot.refuse_length(min(stays, default=size + 1), size + 1)
        elif isinstance(slot, EmbeddingSlot) and slot.shared_by_batch and found:
            raise slot.refuse_length(after[0].length, size + 1)
        if Growth.FOLDED in growths:
            slot.layout.folded = True
        return found

    def _check_rows(self, args: Any, kwargs: Mapping[str, Any], size: int) -> None:
        """As the model is, but for dropout; in evaluation mode if it is random even so.

        A few samples do: those that meet do so among few as among many. Samples that meet at
        random are left to the standing check, which repeats what is random.
        """
        args, kwargs, size = _few(args, kwargs, size)
        host = HostGenerators.now()
        try:
            for mode in (_without_dropout, in_eval_mode):
                with mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
                    if self._rows_are_kept(args, kwargs, size):
                        return
        finally:
            host.restore()

    def _rows_are_kept(self, args: Any, kwargs: Mapping[str, Any], size: int) -> bool:
        """Whether samples keep their rows; False if random numbers forbid the comparison.

        Raises:
            UnsupportedModuleError: they do not.
        """

        def rows(change: Change, seed: int = 0) -> RowMarks:
            changed_args, changed_kwargs = change(args, size), change(dict(kwargs), size)
            # Layers dropped as a whole, for one, are then the same in every run.
            torch.manual_seed(seed)
            host.restore()
            return rows_of(
                self._slots,
                lambda: self._model.forward(*changed_args, **changed_kwargs),
                find_batch(changed_args, changed_kwargs)[0],
            )

        host = HostGenerators.now()
        plain = rows(as_it_is)
        self._hidden += has_nan(plain)
        self.has_numbers = bool(plain[NUMBERS])
        try:
            halves = (rows(first_half), rows(second_half))
        except (RuntimeError, ValueError, IndexError):
            # The model takes no batch so small, which is not for us to judge.
            halves = None
        found = find_moved_rows(plain, rows(one_more), rows(back_to_front), halves, size)
        if found is None:
            if halves is not None:
                self.mixed_numbers |= find_mixed_numbers(plain, halves, size)
                self.saw_uneven = self.saw_uneven or are_uneven(args, kwargs, size)
            return True
        if not repeats(plain, rows(as_it_is, seed=1)):
            return False
        raise moved_rows("" if found == OUTPUTS else self._slots[found].path)

    @contextmanager
    def _watching(self, calls: Calls) -> Iterator[None]:
        with ExitStack() as hooks:
            for slot in self._slots:

                def note(_: nn.Module, args: Any, kwargs: Any, slot: Slot = slot) -> None:
                    found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                    noted = calls.setdefault(slot.index, [])
                    if found and found[0].dim() > slot.batch_axis:
                        x = found[0]
                        noted.append(Given(x.shape[slot.batch_axis], tuple(x.shape), x.dtype))

                handle = slot.module.register_forward_pre_hook(note, with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def _refuse_without_input(self, calls: Calls) -> None:
        """Parameters without input get a row per sample; folded ones would need more."""
        for slot in self._slots:
            if calls.get(slot.index) == []:
                raise UnsupportedModuleError(
                    slot.path,
                    expected="an input that tells how many rows belong to a sample",
                    got="none, in a model that folds its batch into another axis",
                    remedy="freeze this module with requires_grad_(False)",
                )

    def _check_shared(
        self,
        found: Mapping[int, Sequence[tuple[Growth, int]]],
        args: Any,
        kwargs: Mapping[str, Any],
        size: int,
    ) -> None:
        """What layers compute once for all samples must only be broadcast over them."""
        two_args, two_kwargs = first_two(args, size), first_two(dict(kwargs), size)
        for slot in self._slots:
            if {growth for growth, _ in found[slot.index]} & {Growth.ONE, Growth.NONE}:
                check_shared(
                    slot, self._slots, lambda: self._model.forward(*two_args, **two_kwargs)
                )


def _few(args: Any, kwargs: Mapping[str, Any], size: int) -> tuple[Any, Mapping[str, Any], int]:
    """The call with its first samples only, and how many these are."""
    if size <= _MAX_ROWS:
        return args, kwargs, size
    few = [*range(_MAX_ROWS)]
    return chosen(args, size, few), chosen(dict(kwargs), size, few), _MAX_ROWS


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


def _fits(length: int, growth: Growth, size: int) -> bool:
    """Whether an input that grows so may have that length in a batch of `size`."""
    if growth is Growth.FOLDED:
        return length % size == 0
    return growth is Growth.NONE or length == (1 if growth is Growth.ONE else size)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Run without gradients, dropout or warnings, and otherwise as the model is."""
    with (
        dropout_silenced(model),
        torch.no_grad(),
        without_fast_attention(),
        paused(),
        warnings.catch_warnings(action="ignore"),
    ):
        yield
