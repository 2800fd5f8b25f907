"""Checks that the first axis of every layer's input really is the batch.

Some inputs have no batch axis: the ids of a table of positions, of shape (T,), or a table (T, D)
that goes through a linear map. Their gradient arrives already summed over the samples. Where T
differs from the batch size, the shapes show it. Where T happens to equal the batch size, nothing
shows it, and the clipping would be silently wrong. So a few samples of the first batch are run
twice without gradients, once as they are and once with one sample added. Inputs that carry the
batch grow. All others do not.

The first batch may mislead: with a single token, (T, D) has one row, like an input that is
broadcast. So a few samples of every new kind of batch are run once without gradients. If a layer
then sees a length it should not, everything is checked again.

Some models fold the batch into another axis. There the number of rows of a sample is counted, and
the count must be right every time. So such a model is checked with the whole batch, for every new
shape, and again once its samples have different lengths.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.clipping.capture.batch_size import shapes_beside_batch
from shuffled_dpsgd.clipping.capture.samples import are_ragged
from shuffled_dpsgd.clipping.capture.slot import ONE_FOR_ALL, Slot
from shuffled_dpsgd.clipping.checks.changed_batches import first_few, one_more
from shuffled_dpsgd.clipping.checks.input_growth import (
    Calls,
    Given,
    Growth,
    find_calls,
    fits,
    judge_growth,
)
from shuffled_dpsgd.clipping.rules.trial_runs import buffers_kept, in_eval_mode
from shuffled_dpsgd.errors import UnsupportedModuleError


class BatchAxisCheck:
    """Checks the batch axis on the first batch, and on every kind not seen before."""

    def __init__(self, model: nn.Module, slots: Sequence[Slot]) -> None:
        self._seen = 0
        # The kinds that were checked, with the rows a sample then has in calls of folded slots.
        self._known: dict[Hashable, dict[int, tuple[int, ...]]] = {}
        self._latest: Calls = {}
        # What was found out, call by call, and how many axes the input had.
        self._found: dict[int, list[tuple[Growth, int]]] = {}
        self._model = model
        self._slots = slots

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
            UnsupportedModuleError: a layer's input does not grow with the batch, or the model
                cannot be run with one sample more.
        """
        is_first = min(size, 2) > self._seen
        if is_first or self._folds() or not self._is_as_before(args, kwargs, size):
            self._check(args, kwargs, size, late)
            self._seen = max(self._seen, min(size, 2))
        self._remember(args, kwargs, size, kind)

    @property
    def shared(self) -> list[Slot]:
        """Slots that compute something once for all samples."""
        kinds = {Growth.ONE, Growth.NONE}
        found = self._found
        return [s for s in self._slots if {g for g, _ in found.get(s.index, [])} & kinds]

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
        """The rows a sample had in each of a slot's latest calls; empty if calls come and go."""
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

    def _is_as_before(self, args: Any, kwargs: Mapping[str, Any], size: int) -> bool:
        """Whether every layer sees the lengths it should, by what was found before."""
        args, kwargs, size = first_few(args, kwargs, size)
        with in_eval_mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
            calls = self._latest = find_calls(self._model, self._slots, args, kwargs)
        for index, given in calls.items():
            found = self._found.get(index, [])
            if len(given) != len(found):
                return False
            for call, (growth, axes_before) in zip(given, found, strict=True):
                if call.axes != axes_before or not fits(call.length, growth, size):
                    return False
        return True

    def _check(self, args: Any, kwargs: Mapping[str, Any], size: int, late: bool) -> None:
        """Check a few samples; the whole batch if the model folds it or takes no smaller one."""
        few_args, few_kwargs, few = first_few(args, kwargs, size)
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
            before = self._latest = find_calls(self._model, self._slots, args, kwargs)
            try:
                after = find_calls(self._model, self._slots, more_args, more_kwargs)
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
                found[slot.index] = judge_growth(
                    slot, given, after.get(slot.index, []), size, self._found.get(slot.index, [])
                )
                if Growth.NONE in {growth for growth, _ in found[slot.index]}:
                    if late and not slot.shared_by_batch:
                        _refuse_late(slot, given, whole)
                    slot.layout.shared_by_batch = True
            if any(slot.folded for slot in self._slots):
                self._refuse_without_input(after)
                for slot in self._slots:
                    # A mixture of experts may call a layer later that it has not called now.
                    unseen = slot.may_fold and slot.index not in before
                    slot.layout.folded = slot.folded or unseen
        self._found = found

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
