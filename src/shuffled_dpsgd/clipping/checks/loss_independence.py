"""Checks that a sample's loss looks at that sample's outputs alone.

The loss is computed outside the model, where no layer sees it. A contrastive loss or one centred
by the batch mixes the samples there: the gradients that come back into the model belong to several
samples at once, and clipping them row by row bounds nobody's contribution. So the losses of some
samples are followed back to the outputs, and must not arrive at others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.loss_graph import edge_of, walk_back
from shuffled_dpsgd.runtime.output_tensors import batch_axes_of

# Samples whose gradients are looked at together.
_ROWS = 32


def check_losses(losses: Tensor, outputs: Sequence[Tensor]) -> bool:
    """For any two samples, follow the one's loss and not the other's back to the `outputs`.

    That takes little time, and for a moment the memory of one more gradient of the outputs.
    Returns whether there was anything to follow.

    Raises:
        UnsupportedModuleError: they arrive at other samples too.
    """
    outputs = [output for output in outputs if output.grad_fn is not None]
    if len(losses) < 2 or not outputs or not losses.requires_grad:
        return False
    places = {edge_of(output): output for output in outputs}
    reached_at, _ = walk_back([edge_of(losses)], places)
    reached = [places[place] for place in reached_at]
    axes = [batch_axes_of(output, len(losses)) for output in reached]
    if not all(axes):
        raise _mixed("a number that the model computed from all samples")
    meet: list[Tensor] = []
    numbers = torch.arange(len(losses), device=losses.device)
    for bit in range((len(losses) - 1).bit_length()) if reached else ():
        for members in ((numbers >> bit) % 2 == 1, (numbers >> bit) % 2 == 0):
            grads = torch.autograd.grad(
                losses, reached, members.to(losses), retain_graph=True, allow_unused=True
            )
            for grad, found in zip(grads, axes, strict=True):
                if grad is not None:
                    touched_B = _touched(grad.movedim(found[0], 0), len(losses))
                    meet.append((touched_B & ~members.to(touched_B.device)).any())
    # The host waits for all trials at once.
    if any(bool(some) for some in meet):
        raise _mixed("losses of some samples with gradients at others")
    return True


def _touched(grad: Tensor, size: int) -> Tensor:
    """(B,) whether samples' rows of a gradient hold anything; zeros times infinity do not count.

    A few rows at a time, because logits are large and another copy would be as well.
    """
    parts = [part.reshape(len(part), -1) for part in grad.reshape(size, -1).split(_ROWS)]
    # In two operations: a GPU takes as long as it reads and writes.
    finite = (torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0) for part in parts)
    return torch.cat([part.any(1) for part in finite])


def _mixed(got: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        "",
        expected="the loss of a sample to depend on that sample alone",
        got=got,
        remedy="do not compare, centre or mix samples in the loss, nor average over all tokens of "
        "a batch; no clip could bound what one of them contributes",
    )
