"""Batches that a compiler has run, followed to their outputs.

A witness sees a model's calls through hooks, which a compiler traces and does not run. Here the
gradients are caught that arrive at the compiled code's outputs when the losses go backward. An
uncompiled forward tells which outputs they belong to. A model that draws random numbers cannot be
followed like this, because compiled code draws others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.runtime.loss_graph import nodes_behind
from shuffled_dpsgd.runtime.output_tensors import tensors_in
from shuffled_dpsgd.runtime.replay import Call

_COMPILED = "CompiledFunctionBackward"


def follow(
    model: nn.Module, lifted: AbstractContextManager[None], losses: Tensor, call: Call
) -> bool:
    """Have the gradients of `call` come with the backward of `losses`; False if they cannot.

    Of the outputs of an uncompiled forward, those with the shapes of the compiled code's outputs
    are taken, in order. The last of several pieces of compiled code need not return them.
    """
    nodes = list(filter(_is_compiled, nodes_behind(losses.grad_fn, lambda _: False)))
    if len(nodes) != 1:
        return False
    kind, enabled, dtype = call.autocast
    with lifted, torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
        outputs = dict(enumerate(tensors_in(model(*call.args, **call.kwargs))))
    is_random = call.before.plain() != call.before.again().plain()
    call.before.restore()
    if is_random:
        return False

    def keep(grads: tuple[Tensor | None, ...]) -> None:
        left = dict(outputs)
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
    return True


def _is_compiled(node: Any) -> bool:
    return bool(node.name() == _COMPILED)
