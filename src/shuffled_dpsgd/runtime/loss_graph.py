"""The graph between a model and its loss: what else is trained there, and how the loss is scaled.

Layers see neither. So every loss is looked at before it goes backward, whoever calls `backward`,
and is followed back as far as the model's outputs, and from the model's inputs on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import UnsupportedModuleError

Edge = tuple[Any, int]
# What `reduction="mean"` is called in a node of the graph; a sum is one more.
_MEAN = 1
_SCALES = ("MulBackward0", "DivBackward0", "SumBackward0")


def edge_of(tensor: Tensor) -> Edge:
    """Where a tensor comes from, which also tells tensors apart that share memory."""
    return tensor.grad_fn, tensor.output_nr


def walk_back(starts: Iterable[Edge], ends: Collection[Edge]) -> tuple[list[Edge], list[Tensor]]:
    """Those of the `ends` that come first on the ways back, and the leaves on these ways.

    An encoder-decoder also returns its encoder's output. Going back that far would lead through
    the decoder, and compute checkpointed layers again.
    """
    waiting = list(starts)
    seen = set(waiting)
    found: list[Edge] = []
    leaves: list[Tensor] = []
    while waiting:
        place = waiting.pop()
        if place in ends:
            found.append(place)
            continue
        leaf = getattr(place[0], "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        behind = () if place[0] is None else place[0].next_functions
        waiting += [step for step in behind if step not in seen]
        seen.update(behind)
    return found, leaves


def nodes_behind(root: Any, stops: Callable[[Any], bool]) -> Iterator[Any]:
    """A node of a graph and those behind it, each once, and none behind those where it `stops`."""
    seen, waiting = {None}, [root]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [] if stops(node) else [behind for behind, _ in node.next_functions]


def refuse_foreign(leaves: Iterable[Tensor], known: Iterable[Tensor], *, where: str) -> None:
    """Refuse leaves that a backward would train unseen.

    Raises:
        UnsupportedModuleError: naming the first of them.
    """
    own = {id(each) for each in known}
    for leaf in leaves:
        if id(leaf) not in own:
            raise UnsupportedModuleError(
                "losses",
                expected="a loss whose only trainable parameters are the model's",
                got=f"a tensor of shape {tuple(leaf.shape)} in the {where} that requires "
                "gradients: it would be trained on gradients that nobody clips",
                remedy="make it a parameter of a module of the model, or call "
                "requires_grad_(False) on it",
            )


def scale_of(loss: Tensor, ends: Collection[Edge]) -> tuple[float, str]:
    """By which constants a loss was multiplied last, and what was: a "mean", a "sum", or "".

    One number that is among the `ends`, the model's outputs, is taken for a mean.
    """
    factor, place, of = 1.0, edge_of(loss), ""
    while place not in ends and (kind := type(place[0]).__name__) in _SCALES:
        node, ways = place[0], place[0].next_functions
        by_first = kind == "MulBackward0" and ways[0][0] is None
        if kind == "SumBackward0":
            of = "sum"
        else:
            by = node._saved_self if by_first else node._saved_other
            if by is None or by.dim() > 0 or by.requires_grad:
                return factor, of
            factor *= 1.0 / float(by) if kind == "DivBackward0" else float(by)
        place = ways[1] if by_first else ways[0]
    node, number = place
    if node is None or node._input_metadata[number].shape:
        return factor, of
    reduction = getattr(node, "_saved_reduction", None)
    is_mean = place in ends or kind.startswith("MeanBackward") or reduction == _MEAN
    return factor, "mean" if is_mean else "sum" if reduction == _MEAN + 1 else of


class LossGraph:
    """Looks at every loss of `model` before it goes backward.

    `own` are leaves that belong to the model besides its parameters. Those in `scales` are given
    what finds `scale_of` the loss.
    """

    def __init__(self, model: nn.Module, own: Callable[[], Sequence[Tensor]]) -> None:
        self.scales: list[Callable[[Callable[[], tuple[float, str]]], None]] = []
        self._model = model
        self._own = own
        self._inputs: list[Tensor] = []
        self.ends: dict[Edge, int] = {}
        self._rows: set[torch.Size] = set()

    def note_inputs(self, inputs: Iterable[Any]) -> None:
        """A forward begins."""
        self._inputs = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]

    def note_outputs(self, outputs: Sequence[Tensor]) -> None:
        """A forward is over; `ends` are its outputs that require gradients, with their places."""
        self.ends = {edge_of(t): i for i, t in enumerate(outputs) if t.grad_fn is not None}
        self._rows = {each.shape[:1] for each in outputs}

    def look(self, losses: Sequence[Tensor]) -> None:
        """Refuse losses of the model that train what is not the model's.

        Of a compiled model the outputs are not known, and a loss leads through it. Then only
        parameters of others are refused. Rows of the batch may require gradients.
        """
        ends, inputs, rows = self.ends, self._inputs, self._rows
        reached, leaves = walk_back(map(edge_of, losses), ends)
        known = [*self._model.parameters(), *self._own()] if leaves or inputs else []
        if not reached and not {id(leaf) for leaf in leaves} & {id(each) for each in known}:
            return
        leaves = leaves if reached else [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        refuse_foreign(leaves, known, where="loss")
        _, leaves = walk_back([edge_of(each) for each in inputs if each.grad_fn is not None], ())
        for each in inputs:
            is_row = each.shape[:1] in rows and not isinstance(each, nn.Parameter)
            leaves += [each] if each.grad_fn is None and not is_row else []
        refuse_foreign(leaves, known, where="inputs of the model")
        for told in self.scales:
            told(partial(scale_of, losses[0], ends))
        # A graph holds activations.
        self.ends, self._inputs = {}, []


@contextmanager
def every_backward(look: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """Inside, `look` is called before every backward; autograd itself has no hook for that."""
    inner, is_over = torch.autograd.backward, False

    @wraps(inner)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not is_over and torch._C._current_graph_task_id() < 0:
            look([tensors] if isinstance(tensors, Tensor) else list(tensors))
        inner(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        is_over = True
        if torch.autograd.backward is backward:
            torch.autograd.backward = inner
