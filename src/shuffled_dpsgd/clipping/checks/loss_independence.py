"""Checks that a sample's loss looks at that sample's outputs alone, and trains nothing of its own.

The loss is computed outside the model, where no layer sees it. A contrastive loss or one centred
by the batch mixes the samples there: the gradients that come back into the model belong to several
samples at once, and clipping them row by row bounds nobody's contribution. So the losses of some
samples are followed back to the outputs, and must not arrive at others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.output_tensors import batch_axes_of

# Samples whose gradients are looked at together.
_ROWS = 32


def check_losses(
    losses: Tensor, outputs: Sequence[Tensor], parameters: Mapping[str, Tensor] | None
) -> bool:
    """For any two samples, follow the one's loss and not the other's back to the `outputs`.

    That takes little time, and for a moment the memory of one more gradient of the outputs.
    `parameters` are what the losses may train. Returns whether there was anything to follow.

    Raises:
        UnsupportedModuleError: they arrive at other samples too.
    """
    outputs = [output for output in outputs if output.requires_grad]
    if len(losses) < 2 or not outputs or not losses.requires_grad:
        return False
    reached = refuse_foreign(losses, outputs, parameters)
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


def refuse_foreign(
    losses: Tensor, outputs: Sequence[Tensor], parameters: Mapping[str, Tensor] | None
) -> list[Tensor]:
    """The outputs that losses come from; refuse other tensors that would be trained on the way.

    Without `parameters` nothing is refused. Where no output is reached, the way leads through the
    model, which may make leaves of its own: then only parameters of others are refused.

    Raises:
        UnsupportedModuleError: naming the first of them.
    """
    reached, leaves = _first_reached(losses, outputs)
    known = {id(parameter) for parameter in (parameters or {}).values()}
    for leaf in leaves if parameters is not None else ():
        if id(leaf) not in known and (reached or isinstance(leaf, nn.Parameter)):
            raise UnsupportedModuleError(
                "losses",
                expected="a loss whose only trainable parameters are the model's",
                got=f"a tensor of shape {tuple(leaf.shape)} in the loss that requires gradients: "
                "it would be trained on gradients that nobody clips",
                remedy="make it a parameter of a module of the model, or call "
                "requires_grad_(False) on it",
            )
    return reached


def _first_reached(losses: Tensor, outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
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
