"""Batches that a compiler has run, followed for the referee.

The referee's witness sees a model's calls through hooks, which a compiler traces and does not run.
Here the call is put together from outside: the inputs that the engine keeps, and the gradients that
arrive at the compiled code's outputs when the losses go backward. An uncompiled forward tells which
outputs they belong to. A model that draws random numbers cannot be followed like this, because
compiled code draws others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.core.clip import ClippedSums
from shuffled_dpsgd.runtime.replay import Call, Generators, versions_of

_COMPILED = "CompiledFunctionBackward"


def follow(
    model: nn.Module,
    engine: ClippedSums,
    losses: Tensor,
    inputs: tuple[Any, Mapping[str, Any], torch.dtype | None],
) -> Call | None:
    """The call behind `losses`, whose gradients come with their backward; None if it has no trace.

    Of the outputs of an uncompiled forward, those with the shapes of the compiled code's outputs
    are taken, in order.
    """
    args, kwargs, lowered = inputs
    nodes = list(_compiled_nodes(losses.grad_fn))
    if len(nodes) != 1:
        return None
    device = next(model.parameters()).device
    dtype = lowered or torch.get_autocast_dtype(device.type)
    before = Generators.now(device)
    with (
        engine.lifted(),
        torch.no_grad(),
        torch.autocast(device.type, dtype=dtype, enabled=lowered is not None),
    ):
        outputs = dict(enumerate(tree_leaves(model(*args, **kwargs))))
    is_random = before.torch_has_moved()
    before.restore()
    if is_random:
        return None
    call = Call(
        args=args,
        kwargs=kwargs,
        versions=versions_of(args, kwargs),
        before=before,
        autocast=(device.type, lowered is not None, dtype),
    )

    def keep(grads: tuple[Tensor | None, ...]) -> None:
        left = {i: out for i, out in outputs.items() if isinstance(out, Tensor)}
        found = {}
        for grad in grads:
            if grad is None:
                continue
            place = next((i for i, out in left.items() if out.shape == grad.shape), None)
            if place is None:
                return  # An output that the model does not have uncompiled: nothing is followed.
            left = {i: out for i, out in left.items() if i > place}
            found[place] = grad.detach()
        call.cotangents.update(found)

    nodes[0].register_prehook(keep)
    return call


def _compiled_nodes(root: Any) -> Iterator[Any]:
    """The pieces of compiled code that a backward reaches first."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == _COMPILED:
            yield node
        else:
            waiting += [following for following, _ in node.next_functions]
