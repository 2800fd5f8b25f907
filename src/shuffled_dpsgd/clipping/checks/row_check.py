"""Runs the model on changed batches, to see that every sample keeps its rows.

What is compared, and why that is enough, is said in `row_identity.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.clipping.capture.batch_size import find_batch
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.changed_batches import (
    as_it_is,
    back_to_front,
    first_few,
    first_half,
    one_more,
    second_half,
)
from shuffled_dpsgd.clipping.checks.loss_independence import are_uneven
from shuffled_dpsgd.clipping.checks.random_states import RandomStates, randomness_kept
from shuffled_dpsgd.clipping.checks.row_identity import (
    NUMBERS,
    OUTPUTS,
    RowMarks,
    Weights,
    find_mixed_numbers,
    find_moved_rows,
    has_nan,
    moved_rows,
    repeats,
    rows_of,
)
from shuffled_dpsgd.clipping.checks.solo_runs import dropout_silenced
from shuffled_dpsgd.clipping.rules.trial_runs import (
    buffers_kept,
    in_eval_mode,
    without_fast_attention,
)

Change = Callable[[Any, int], Any]


class RowCheck:
    """Checks that samples keep their rows and see no others, on some samples of a batch.

    `mixed_numbers` says which single numbers among the outputs are no sum or mean of losses,
    `has_numbers` whether there are any, and `saw_uneven` whether samples had different numbers of
    labels, without which a mean over tokens looks like one over samples. `num_hidden` counts
    batches in which some number was NaN: they hide what the others of their kind would show.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot]) -> None:
        self.mixed_numbers: frozenset[int] = frozenset()
        self.has_numbers = False
        self.saw_uneven = False
        self.num_hidden = 0
        self._model = model
        self._slots = slots

    def check(self, args: Any, kwargs: Mapping[str, Any], size: int) -> None:
        """Check the model without dropout but otherwise as it is.

        If it is random even so, it is checked in evaluation mode. A few samples are enough, because
        samples that meet do so in small batches too. Samples that meet at random are left to the
        standing check, which repeats random numbers.

        Raises:
            UnsupportedModuleError: a sample's row moves, or depends on another sample.
        """
        args, kwargs, size = first_few(args, kwargs, size)
        with randomness_kept(self._model, find_batch(args, kwargs).device):
            for mode in (_without_dropout, in_eval_mode):
                with mode(self._model), buffers_kept(self._model):
                    if self._rows_are_kept(args, kwargs, size):
                        return

    def _rows_are_kept(self, args: Any, kwargs: Mapping[str, Any], size: int) -> bool:
        """Whether samples keep their rows; False if random numbers forbid the comparison.

        Raises:
            UnsupportedModuleError: they do not.
        """

        def rows(change: Change, seed: int = 0) -> RowMarks:
            changed_args, changed_kwargs = change(args, size), change(dict(kwargs), size)
            # So that, for one, the same layers are dropped in every run.
            (states if seed == 0 else states.shared).restore()
            torch.manual_seed(seed)
            return rows_of(
                self._slots,
                lambda: self._model.forward(*changed_args, **changed_kwargs),
                len(find_batch(changed_args, changed_kwargs)),
                weights,
            )

        weights: Weights = {}
        states = RandomStates.now(self._model, find_batch(args, kwargs).device)
        plain = rows(as_it_is)
        self.num_hidden += has_nan(plain)
        self.has_numbers = bool(plain[NUMBERS])
        try:
            halves = (rows(first_half), rows(second_half))
        except (RuntimeError, ValueError, IndexError):
            # The model takes no batch this small. That alone is no reason to refuse it.
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
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Run without gradients, dropout or warnings, and otherwise as the model is."""
    with (
        dropout_silenced(model),
        torch.no_grad(),
        without_fast_attention(),
        warnings.catch_warnings(action="ignore"),
    ):
        yield
