"""Checks, once, that the first axis of every layer's input really is the batch.

A table of positions looked up with ids of shape (T,), or a linear map of a (T, D) table, has no
batch axis: its gradient arrives already summed over the samples. Where T differs from the batch
size the shapes give that away; where it happens to be equal nothing does, and the clipping would
be silently wrong. So the first batch is run once more, without gradients, with one sample added:
inputs that carry the batch grow, all others do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map

from shuffled_dpsgd.clipping.inputs import find_batch
from shuffled_dpsgd.clipping.rules.base import Slot
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot
from shuffled_dpsgd.clipping.rules.generic import (
    buffers_kept,
    in_eval_mode,
    without_fast_attention,
)
from shuffled_dpsgd.clipping.sample_rows import (
    OUTPUTS,
    Rows,
    find_mixed_numbers,
    find_moved_rows,
    moved_rows,
    repeats,
    row_differs,
    rows_of,
    same_shapes,
)
from shuffled_dpsgd.clipping.shared_inputs import check_shared
from shuffled_dpsgd.errors import UnsupportedModuleError

Change = Callable[[Any, int], Any]
# The lengths of the first axes of each slot's inputs; none of one that is called without any.
Lengths = dict[int, set[int]]
# How often samples that meet at random get a chance to.
_SEEDS = 4


class BatchAxisCheck:
    """Runs the check on the first batch, and that samples keep apart on the first of several.

    `mixed_numbers` says which single numbers among the outputs are then no sum or mean of losses.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot]) -> None:
        self.mixed_numbers: frozenset[int] = frozenset()
        self._seen = 0
        self._model = model
        self._slots = slots

    def is_due(self, size: int) -> bool:
        """Whether a batch of `size` would show what no batch has shown yet."""
        return min(size, 2) > self._seen

    def run(self, args: Any, kwargs: Mapping[str, Any], size: int) -> None:
        """Probe the model with the inputs of a batch of `size` samples.

        Raises:
            UnsupportedModuleError: a layer's input does not grow with the batch, samples change
                places or see each other, or the model cannot be run with one sample more.
        """
        more_args, more_kwargs = _one_more(args, size), _one_more(dict(kwargs), size)
        lengths: Lengths = {}
        with in_eval_mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
            with self._watching(lengths):
                try:
                    self._model.forward(*more_args, **more_kwargs)
                except (RuntimeError, ValueError, IndexError) as error:
                    # An error of the model's own comes up here again, and is then raised as it is.
                    self._model.forward(*args, **kwargs)
                    raise UnsupportedModuleError(
                        "",
                        expected="a model that also runs with one sample more",
                        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                        remedy="give every input that belongs to samples a batch axis 0, and no "
                        "other input that length",
                    ) from error
            self._mark_folded(lengths, args, kwargs, size)
            self._mark_shared(lengths, size + 1)
            self._check_shared(lengths, more_args, more_kwargs, size + 1)
        if size > 1:
            self._check_rows(args, kwargs, size)
        self._seen = min(size, 2)

    def _check_rows(self, args: Any, kwargs: Mapping[str, Any], size: int) -> None:
        """As the model is, but for dropout layers; in evaluation mode if it is random even so."""
        for mode in (_without_dropout, in_eval_mode):
            with mode(self._model), buffers_kept(self._model), torch.random.fork_rng():
                if self._rows_are_kept(args, kwargs, size):
                    return

    def _rows_are_kept(self, args: Any, kwargs: Mapping[str, Any], size: int) -> bool:
        """Whether samples keep their rows; False if random numbers forbid the comparison.

        Raises:
            UnsupportedModuleError: they do not.
        """

        def rows(change: Change, seed: int = 0) -> Rows:
            changed_args, changed_kwargs = change(args, size), change(dict(kwargs), size)
            # Layers dropped as a whole, for one, are then the same in every run.
            torch.manual_seed(seed)
            return rows_of(
                self._slots,
                lambda: self._model.forward(*changed_args, **changed_kwargs),
                find_batch(changed_args, changed_kwargs)[0],
            )

        plain = rows(_as_it_is)
        try:
            halves = (rows(_first_half), rows(_second_half))
        except (RuntimeError, ValueError, IndexError):
            # The model takes no batch so small, which is not for us to judge.
            halves = None
        found = find_moved_rows(plain, rows(_one_more), rows(_back_to_front), halves, size)
        if found is None:
            if halves is not None:
                self.mixed_numbers = find_mixed_numbers(plain, halves, size)
            return True
        if not repeats(plain, rows(_as_it_is, seed=1)):
            _refuse_random_mixing(rows, size)
            return False
        raise moved_rows("" if found == OUTPUTS else self._slots[found].path)

    @contextmanager
    def _watching(self, lengths: Lengths) -> Iterator[None]:
        with ExitStack() as hooks:
            for slot in self._slots:

                def note(_: nn.Module, args: Any, kwargs: Any, slot: Slot = slot) -> None:
                    found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                    noted = lengths.setdefault(slot.index, set())
                    if found and found[0].dim() > slot.batch_axis:
                        noted.add(found[0].shape[slot.batch_axis])

                handle = slot.module.register_forward_pre_hook(note, with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def _mark_folded(self, grown: Lengths, args: Any, kwargs: Mapping[str, Any], size: int) -> None:
        """Note whose inputs have as many rows of every sample, in the batch and with one more.

        What lengths cannot tell, in which order these rows come, the rows themselves will.
        """
        lengths: Lengths = {}
        for slot in self._slots:
            others = grown.get(slot.index, set()) - {1, size + 1}
            if not others or not slot.may_fold or any(other % (size + 1) for other in others):
                continue
            if not lengths:
                with self._watching(lengths):
                    self._model.forward(*args, **kwargs)
            rows = {other // (size + 1) for other in others}
            if {size * number for number in rows} == lengths.get(slot.index, set()) - {1, size}:
                slot.folded = True
                # From here on they are as long as the batch.
                grown[slot.index] = grown[slot.index] - others | {size + 1}
        if any(slot.folded for slot in self._slots):
            self._refuse_without_input(grown)

    def _refuse_without_input(self, lengths: Lengths) -> None:
        """Parameters without input get a row per sample; folded ones would need more."""
        for slot in self._slots:
            if lengths.get(slot.index) == set():
                raise UnsupportedModuleError(
                    slot.path,
                    expected="an input that tells how many rows belong to a sample",
                    got="none, in a model that folds its batch into another axis",
                    remedy="freeze this module with requires_grad_(False)",
                )

    def _mark_shared(self, lengths: Lengths, size: int) -> None:
        """Note which embeddings are shared by the batch; refuse any other such layer."""
        if any(lengths.values()) and all(found <= {1} for found in lengths.values()):
            raise UnsupportedModuleError(
                "",
                expected=f"the first tensor of the call to be a batch of {size - 1} samples",
                got="layers whose inputs all have length one",
                remedy="pass the samples first, other tensors after them; expand what all samples "
                "share before the first trainable layer",
            )
        for slot in self._slots:
            others = lengths.get(slot.index, set()) - {1, size}
            if not others:
                continue
            if not isinstance(slot, EmbeddingSlot) or size in lengths[slot.index]:
                raise slot.refuse_length(min(others), size)
            slot.shared_by_batch = True

    def _check_shared(
        self, lengths: Lengths, args: Any, kwargs: Mapping[str, Any], size: int
    ) -> None:
        """What layers compute once for all samples must only be broadcast over them."""
        two_args, two_kwargs = _first_two(args, size), _first_two(dict(kwargs), size)
        for slot in self._slots:
            if lengths.get(slot.index, set()) - {size}:
                check_shared(
                    slot, self._slots, lambda: self._model.forward(*two_args, **two_kwargs)
                )


def _refuse_random_mixing(rows: Callable[[Change, int], Rows], size: int) -> None:
    """Refuse samples that meet at random: mix-up in training, noise as large as the batch.

    With one seed and all shapes the same, a model draws the same numbers: what becomes of one half
    of the batch must not change with the other half. What draws elsewhere is passed over.

    Raises:
        UnsupportedModuleError: it does.
    """
    half = size // 2
    for seed in range(_SEEDS):
        plain = rows(_as_it_is, seed)
        if not repeats(plain, rows(_as_it_is, seed)):
            return
        for change, kept in ((_second_replaced, range(half)), (_first_replaced, range(half, size))):
            other = rows(change, seed)
            if same_shapes(plain, other) and any(
                row_differs(plain, other, row, size) for row in kept
            ):
                raise moved_rows("")


def _one_more(inputs: Any, size: int) -> Any:
    """Inputs with the first sample repeated at the end of every tensor that has the batch."""
    return _chosen(inputs, size, [*range(size), 0])


def _first_two(inputs: Any, size: int) -> Any:
    return _chosen(inputs, size, [0, 1])


def _first_half(inputs: Any, size: int) -> Any:
    return _chosen(inputs, size, [*range(size // 2)])


def _second_half(inputs: Any, size: int) -> Any:
    return _chosen(inputs, size, [*range(size // 2, size)])


def _first_replaced(inputs: Any, size: int) -> Any:
    """Inputs with the last sample in the place of every sample of the first half."""
    return _chosen(inputs, size, [size - 1] * (size // 2) + [*range(size // 2, size)])


def _second_replaced(inputs: Any, size: int) -> Any:
    """Inputs with the first sample in the place of every sample of the second half."""
    return _chosen(inputs, size, [*range(size // 2)] + [0] * (size - size // 2))


def _chosen(inputs: Any, size: int, samples: list[int]) -> Any:
    """Inputs with these samples in every tensor that has the batch."""

    def choose(leaf: Any) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        return leaf[samples] if has_batch else leaf

    return tree_map(choose, inputs)


def _as_it_is(inputs: Any, size: int) -> Any:
    return inputs


def _back_to_front(inputs: Any, size: int) -> Any:
    """Inputs with the samples in reverse order."""
    return _chosen(inputs, size, [*reversed(range(size))])


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Run without gradients or warnings as the model is, except that dropout layers pass on all."""
    active = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    for dropout in active:
        dropout.training = False
    try:
        with torch.no_grad(), without_fast_attention(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for dropout in active:
            dropout.training = True
