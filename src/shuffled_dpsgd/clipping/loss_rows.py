"""Checks, once, that a sample's loss looks at that sample's outputs alone.

The loss is computed outside the model, where no layer sees it. A contrastive loss or one centred
by the batch mixes the samples there: the gradients that come back into the model belong to several
samples at once, and clipping them row by row bounds nobody's contribution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.errors import UnsupportedModuleError


class LossCheck:
    """Keeps the outputs of a forward until the losses come; afterwards `done` and never again."""

    def __init__(self) -> None:
        self.done = False
        self._outputs: list[Tensor] = []

    def note(self, output: Any, size: int) -> None:
        """Remember the outputs of a batch of `size`, where it could show anything."""
        self._outputs = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor)
            and leaf.requires_grad
            and leaf.dim() > 0
            and leaf.shape[0] == size > 1
        ]

    def run(self, losses: Tensor) -> None:
        """Follow the first sample's loss back to the outputs, no further.

        That takes little time, but for a moment the memory of one more gradient of the outputs.

        Raises:
            UnsupportedModuleError: it arrives at other samples too.
        """
        outputs, self._outputs = self._outputs, []
        if not outputs or not losses.requires_grad:
            return
        self.done = True
        first = losses[0]
        outputs = _first_reached(first, outputs)
        if not outputs:
            return
        grads = torch.autograd.grad(first, outputs, retain_graph=True, allow_unused=True)
        if any(grad is not None and _reaches_others(grad) for grad in grads):
            raise UnsupportedModuleError(
                "",
                expected="the loss of a sample to depend on that sample alone",
                got="a loss of sample 0 with gradients at other samples",
                remedy="do not compare, centre or mix samples in the loss; no clip could bound "
                "what one of them contributes",
            )


def _first_reached(loss: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    """The outputs met on the way back from the loss, without those that lie behind them.

    A decoder's model also returns what its encoder computed; the way there leads through the
    decoder, and would have checkpointed layers computed again.
    """
    places = {(output.grad_fn, output.output_nr): output for output in outputs}
    waiting = [(loss.grad_fn, loss.output_nr)]
    seen = set(waiting)
    found = []
    while waiting:
        place = waiting.pop()
        if place in places:
            found.append(places[place])
            continue
        behind = () if place[0] is None else place[0].next_functions
        waiting += [step for step in behind if step not in seen]
        seen.update(behind)
    return found


def _reaches_others(grad: Tensor) -> bool:
    """Whether rows other than the first get anything; zeros times infinity do not count."""
    others = grad[1:]
    return bool(((others != 0) & torch.isfinite(others)).any())
