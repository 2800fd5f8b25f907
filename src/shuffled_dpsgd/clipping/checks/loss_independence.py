"""Checks, once, that a sample's loss looks at that sample's outputs alone.

The loss is computed outside the model, where no layer sees it. A contrastive loss or one centred
by the batch mixes the samples there: the gradients that come back into the model belong to several
samples at once, and clipping them row by row bounds nobody's contribution.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from inspect import isfunction
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.output_tensors import batch_axis_of, tensors_in
from shuffled_dpsgd.errors import UnsupportedModuleError

# Samples whose gradients are looked at together.
_ROWS = 32


class LossCheck:
    """Keeps the outputs of a forward until the losses come.

    The first losses are tried for every pair of samples; then it is `done`, and later ones are
    tried for single samples only.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        self.done = False
        self._parameters = parameters
        self._outputs: list[Tensor] = []

    def note(self, output: Any, size: int) -> None:
        """Keep the outputs of a batch of `size`; those of a single sample would show nothing."""
        found = tensors_in(output) if size > 1 else []
        self._outputs = [leaf for leaf in found if leaf.requires_grad]

    def run(self, losses: Tensor, samples: Sequence[int] = ()) -> None:
        """Follow the losses of some samples back to the outputs, no further.

        The first time, for any two samples there is a trial with the one and without the other.
        Later, each of `samples` is followed without the others, and the others without it. That
        takes little time, and for a moment the memory of one more gradient of the outputs.

        Raises:
            UnsupportedModuleError: they arrive at other samples too.
        """
        outputs, self._outputs = self._outputs, []
        if not outputs or not losses.requires_grad:
            return
        trials = _apart(samples, losses) if self.done else _separating(len(losses), losses.device)
        self.done = True
        outputs, leaves = _first_reached(losses, outputs)
        if self._parameters is not None and outputs:
            refuse_foreign(leaves, self._parameters)
        axes = [batch_axis_of(output, len(losses)) for output in outputs]
        if any(axis is None for axis in axes):
            raise _mixed("a number that the model computed from all samples")
        if not outputs:
            return
        meet: list[Tensor] = []
        for members in trials:
            grads = torch.autograd.grad(
                losses, outputs, members.to(losses), retain_graph=True, allow_unused=True
            )
            for grad, axis in zip(grads, axes, strict=True):
                if grad is not None:
                    reached_B = _reached(_by_sample(grad, axis, len(losses)))
                    meet.append((reached_B & ~members.to(reached_B.device)).any())
        # The host waits for all trials at once.
        if any(bool(found) for found in meet):
            raise _mixed("losses of some samples with gradients at others")


def _separating(size: int, device: torch.device) -> Iterator[Tensor]:
    """Masks of samples: for any two samples, one mask has the first and not the second."""
    numbers = torch.arange(size, device=device)
    for bit in range((size - 1).bit_length()):
        members = (numbers >> bit) % 2 == 1
        yield members
        yield ~members


def _apart(samples: Sequence[int], losses: Tensor) -> Iterator[Tensor]:
    """Each of some samples by itself, and all the others."""
    for sample in samples:
        members = torch.zeros(len(losses), dtype=torch.bool, device=losses.device)
        members[sample] = True
        yield members
        yield ~members


def _mixed(got: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        "",
        expected="the loss of a sample to depend on that sample alone",
        got=got,
        remedy="do not compare, centre or mix samples in the loss, nor average over all tokens of "
        "a batch; no clip could bound what one of them contributes",
    )


def _first_reached(losses: Tensor, outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that the losses depend on directly, without those further back; and leaves.

    An encoder-decoder also returns its encoder's output. Going back that far would lead through
    the decoder, and compute checkpointed layers again.
    """
    places = {(output.grad_fn, output.output_nr): output for output in outputs}
    waiting = [(losses.grad_fn, losses.output_nr)]
    seen = set(waiting)
    found: list[Tensor] = []
    leaves: list[Tensor] = []
    while waiting:
        place = waiting.pop()
        if place in places:
            found.append(places[place])
            continue
        leaf = getattr(place[0], "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        behind = () if place[0] is None else place[0].next_functions
        waiting += [step for step in behind if step not in seen]
        seen.update(behind)
    return found, leaves


def refuse_foreign_parameters(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a loss that trains parameters which are not the model's, wherever they stand."""
    leaves = [leaf for leaf in _first_reached(loss, [])[1] if isinstance(leaf, nn.Parameter)]
    refuse_foreign(leaves, parameters)


def refuse_foreign(leaves: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse leaves that require gradients and are no parameters of the model.

    Raises:
        UnsupportedModuleError: naming the first of them.
    """
    known = {id(parameter) for parameter in parameters.values()}
    for leaf in leaves:
        if id(leaf) not in known:
            raise UnsupportedModuleError(
                _name_of(leaf),
                expected="a loss whose only trainable parameters are the model's",
                got=f"a tensor of shape {tuple(leaf.shape)} in the loss that requires gradients: "
                "it would be trained on gradients that nobody clips",
                remedy="make it a parameter of a module of the model, or call "
                "requires_grad_(False) on it",
            )


def _name_of(leaf: Tensor) -> str:
    """The name under which something holds the tensor."""
    for holder in gc.get_referrers(leaf):
        if isinstance(holder, dict):
            for key, value in holder.items():
                if value is leaf and isinstance(key, str) and key not in ("leaf", "self"):
                    return key
        elif isinstance(holder, CellType):
            for closure in gc.get_referrers(holder):
                for function in gc.get_referrers(closure):
                    if isfunction(function) and function.__closure__ is closure:
                        place = [cell is holder for cell in function.__closure__].index(True)
                        return function.__code__.co_freevars[place]
    return "a tensor of the loss"


def _by_sample(grad: Tensor, axis: int | None, size: int) -> Tensor:
    """A gradient with the samples on its first axis, all rows of a sample side by side."""
    moved = grad.movedim(axis or 0, 0)
    return moved if len(moved) == size else moved.unflatten(0, (size, -1))


def _reached(grad: Tensor) -> Tensor:
    """(B,) whether samples' rows of a gradient hold anything; zeros times infinity do not count.

    A few rows at a time, because logits are large and another copy would be as well.
    """
    parts = [part.reshape(len(part), -1) for part in grad.split(_ROWS)]
    # In two operations: a GPU takes as long as it reads and writes.
    finite = (torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0) for part in parts)
    return torch.cat([part.any(1) for part in finite])
