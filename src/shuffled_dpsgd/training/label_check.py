"""Classes and ids that a model has no place for, found before they are trained on.

`cross_entropy` and `nn.Embedding` refuse them by a bare IndexError, or end a GPU's process. What
they have room for shows in the graph of the first losses and in the first calls of embeddings. From
then on all rows that the survey has seen (`rows.py`) are looked at, and every batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.loss_graph import nodes_behind
from shuffled_dpsgd.training.rows import Survey, fields_of

_MOST_NODES = 64
_FEW_WORDS = "build the model with a larger vocabulary, or resize it, as for added tokens"
_REMEDY = "count classes from 0, or build the model with more outputs"


class _Room(NamedTuple):
    """Whole numbers below `size`, and one that is ignored."""

    what: str
    size: int
    ignored: int
    remedy: str

    def refuse_misfits(self, values: Any, where: Callable[[int], str]) -> None:
        """Refuse values that are not among them; `where` says where one is."""
        values = torch.as_tensor(values)
        if not values.numel() or (values.min() >= 0 and values.max() < self.size):
            return
        bad = ((values < 0) | (values >= self.size)) & (values != self.ignored)
        for value in values[bad][:1].tolist():
            raise InvalidArgumentError(
                self.what,
                expected=f"whole numbers from 0 to {self.size - 1}",
                got=f"{value}, in {where(value)}",
                remedy=self.remedy,
            )


class LabelCheck:
    """Knows, from the first batch on, which whole numbers the fields of a batch may have."""

    def __init__(self, model: nn.Module, survey: Survey | None = None) -> None:
        self._model = model
        self._survey = survey
        self._rooms: dict[Hashable, _Room] = {}
        self._hooks: list[RemovableHandle] = []
        self._batch: tuple[Any, Sequence[int]] = ((), ())

    def watch(self, batch: Any, records: Sequence[int]) -> None:
        """A batch of these records is about to be tried out, before the first release."""
        self._batch = batch, records
        # Hooks would have a compiled model compiled anew.
        if not (self._hooks or hasattr(self._model, "_orig_mod")):
            self._hooks = [
                module.register_forward_pre_hook(partial(self._look, name))
                for name, module in self._model.named_modules()
                # Those of positions may override it, and count what they are given.
                if getattr(type(module), "forward", None) is nn.Embedding.forward
            ]

    def stop(self) -> None:
        """Learn no more, and leave nothing on the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._batch = [], ((), ())

    def _look(self, name: str, module: Any, args: Any) -> None:
        """Before an embedding is called."""
        is_plain = args and not torch.compiler.is_compiling() and type(args[0]) is Tensor
        if is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(args[0]):
            self._learn(_Room(name, module.num_embeddings, 0, _FEW_WORDS), args[0])

    def learn(self, losses: Tensor) -> None:
        """Find classes in the losses of a batch, before the first release.

        Raises:
            InvalidArgumentError: some row has a label that is none of them.
        """
        for classes, targets, ignored in _classifications(losses):
            self._learn(_Room("labels", classes, ignored, _REMEDY), targets)

    def _learn(self, room: _Room, values: Tensor) -> None:
        batch, records = self._batch
        fields = [each for each in fields_of(batch) if _come_from(each[1], values)]
        room.refuse_misfits(values, partial(_place_of, fields or fields_of(batch), records))
        # Fields may have the same values by chance, as labels and ids where nothing is padded.
        itself = [each for each in fields if each[1].data_ptr() == values.data_ptr()]
        known = any(self._rooms.get(key) == room for key, _ in fields)
        others = [each for each in fields if each[0] not in self._rooms and not known]
        # Two fields that hold one value each, such as zeros, say nothing of each other.
        certain = itself or (others if len(values.unique()) > 1 else [])
        for key, _ in certain if len(certain) == 1 else ():
            if key not in self._rooms or room.size < self._rooms[key].size:
                self._rooms[key] = room
                for value, row in self._survey.extremes.get(key, ()) if self._survey else ():
                    room.refuse_misfits([value], lambda _, row=row: f"row {row}")  # type: ignore[misc]

    def check(self, loaded: Any, records: Sequence[int]) -> None:
        """Look at a batch that is about to be handed out, on the host.

        Raises:
            InvalidArgumentError: it has a label or an id that the model has no place for.
        """
        fields = dict(fields_of(loaded)) if self._rooms else {}
        for key in self._rooms.keys() & fields.keys():
            where = partial(_place_of, [(key, fields[key])], records)
            self._rooms[key].refuse_misfits(fields[key], where)


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
    for node in islice(nodes_behind(losses.grad_fn, _is_classification), _MOST_NODES):
        if _is_classification(node):
            ignored = node._saved_ignore_index
            # Autograd shows a negative number as an unsigned one of 64 bits.
            ignored -= (ignored >> 63) << 64
            yield node._saved_self.shape[1], node._saved_target, ignored


def _is_classification(node: Any) -> bool:
    return bool(node.name().startswith("NllLoss"))


def _come_from(field: Any, values: Tensor) -> bool:
    """Whether values are those of a field, or in every row those that follow the first."""
    if not (isinstance(field, Tensor) and field.dim() and field.numel()):
        return False
    if field.is_floating_point():
        return False
    rest, following = values.flatten().to(field.device), field[..., 1:]
    if rest.numel() == field.numel() and not torch.equal(rest, field.flatten()):
        rest = rest.view(field.shape)[..., :-1].flatten()
    return any(torch.equal(rest, part.flatten()) for part in (field, following) if part.numel())


def _place_of(fields: Sequence[Any], records: Sequence[int], value: int) -> str:
    """The record of a batch that has a value in one of the fields."""
    for _, field in fields:
        if isinstance(field, Tensor) and field.shape[:1] == (len(records),):
            for row in (field.reshape(len(field), -1) == value).any(1).nonzero()[:1]:
                return f"row {records[int(row)]}"
    return "the batch"
