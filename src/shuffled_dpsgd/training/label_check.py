"""Classes that a loss has no place for, found before anything is spent.

`cross_entropy` refuses such a label when its batch comes, by a bare IndexError and perhaps after
releases. The number of classes shows in the graph of the first losses; what labels there are shows
in the rows that were compared before (`rows.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.rows import Survey, fields_of

_NLL = "NllLoss"
_REMEDY = "count classes from 0, or build the model with more outputs"


class LabelCheck:
    """Knows, from the first losses on, which field of a batch has classes, and how many there are.

    What the survey has not looked at is looked at batch by batch.
    """

    def __init__(self, survey: Survey | None = None) -> None:
        self._survey = survey
        self._known: tuple[Hashable, int, int] | None = None

    def learn(self, losses: Tensor, batch: Any) -> None:
        """Find classes in the losses of a batch, before the first release.

        Raises:
            InvalidArgumentError: some row has a label that is none of them.
        """
        for classes, targets, ignored in _classifications(losses):
            for key, field in fields_of(batch):
                if isinstance(field, Tensor) and torch.equal(field, targets.to(field.device)):
                    self._known = key, classes, ignored
        if self._known is not None and self._survey is not None:
            key, classes, ignored = self._known
            for label, row in self._survey.extremes.get(key, ()):
                _refuse_unless_class(label, classes, ignored, f"row {row}")

    def check(self, loaded: Any) -> None:
        """Look at a batch that is about to be handed out, on the host.

        Raises:
            InvalidArgumentError: it has a label that is no class.
        """
        if self._known is None or (self._survey and self._survey.compared == self._survey.total):
            return
        key, classes, ignored = self._known
        for label in dict(fields_of(loaded))[key].unique().tolist():
            _refuse_unless_class(label, classes, ignored, "the batch that comes next")


@contextmanager
def labels_named() -> Iterator[None]:
    """Turn what `cross_entropy` says of a wrong label inside into an error that names it.

    Raises:
        InvalidArgumentError: in place of an IndexError.
    """
    try:
        yield
    except IndexError as error:
        if not str(error).startswith("Target"):
            raise
        raise InvalidArgumentError(
            "labels", expected="classes of the model", got=str(error), remedy=_REMEDY
        ) from error


def warn_of_labels(model: nn.Module, survey: Survey) -> None:
    """Say that labels seem to be no classes of the model, whose losses nobody has seen yet."""
    sizes = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    fields = [key for key in survey.extremes if key in ("label", "labels", "target", "y", 1)]
    for key in fields if sizes else ():
        label, row = survey.extremes[key][1]
        if 2 <= sizes[-1] <= label:
            warnings.warn(
                f"field {key!r} reaches {label}, in row {row}, and the last layer has {sizes[-1]} "
                f"outputs: if these are classes, {_REMEDY}",
                UserWarning,
                stacklevel=5,
            )


def _classifications(losses: Tensor) -> Iterator[tuple[int, Tensor, int]]:
    """Number of classes, labels and ignored label of every cross entropy behind the losses."""
    seen, waiting = set(), [losses.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(_NLL):
            ignored = node._saved_ignore_index
            # Autograd shows a negative number as an unsigned one of 64 bits.
            ignored -= (ignored >> 63) << 64
            yield node._saved_self.shape[1], node._saved_target, ignored
        elif len(seen) < 64:
            waiting += [behind for behind, _ in node.next_functions]


def _refuse_unless_class(label: int, classes: int, ignored: int, where: str) -> None:
    if not 0 <= label < classes and label != ignored:
        raise InvalidArgumentError(
            "labels",
            expected=f"classes from 0 to {classes - 1}, as many as the loss has logits",
            got=f"{label}, in {where}",
            remedy=_REMEDY,
        )
