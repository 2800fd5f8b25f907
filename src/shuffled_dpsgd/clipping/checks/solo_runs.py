"""Run a model once more without leaving a trace.

Everything such a run may change is put back: gradients, buffers, attributes of modules, and every
generator of random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from shuffled_dpsgd.clipping.capture.output_tensors import tensors_in
from shuffled_dpsgd.clipping.rules.trial_runs import buffers_kept, without_fast_attention


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Whether, and to which type, a forward was cast."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """The setting in force."""
        dtype = torch.get_autocast_dtype(device)
        return cls(device=device, enabled=torch.is_autocast_enabled(device), dtype=dtype)

    def again(self) -> torch.autocast:
        """The same setting."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)


@contextmanager
def without_a_trace(model: nn.Module) -> Iterator[None]:
    """Put back gradients, buffers, attributes of modules and generators afterwards."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    held = [
        (value, value.detach().clone())
        for kept in attributes
        for value in kept.values()
        if isinstance(value, Tensor)
    ]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    host = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with buffers_kept(model), torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(host[0])
            np.random.set_state(host[1])  # noqa: NPY002
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for value, copy in held:
                    value.copy_(copy)
            for module, kept in zip(modules, attributes, strict=True):
                now = module.__dict__
                for key in now.keys() - kept.keys():
                    del now[key]
                now.update(kept)


class _AttentionWithoutDropout(TorchFunctionMode):
    """Fused attention draws its dropout inside one kernel, where nobody can repeat it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**(kwargs or {}), "dropout_p": 0.0}
        return func(*args, **(kwargs or {}))


@contextmanager
def dropout_silenced(model: nn.Module) -> Iterator[None]:
    """Switch off the dropout of dropout layers, recurrent layers and fused attention."""
    active = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    recurrent = [(m, m.dropout) for m in model.modules() if isinstance(m, nn.RNNBase)]
    for dropout in active:
        dropout.training = False
    for layer, _ in recurrent:
        layer.dropout = 0.0
    try:
        with _AttentionWithoutDropout():
            yield
    finally:
        for dropout in active:
            dropout.training = True
        for layer, rate in recurrent:
            layer.dropout = rate


def gradients_of(
    model: nn.Module,
    names: Mapping[str, nn.Parameter],
    call: tuple[Any, Mapping[str, Any]],
    cotangents: Callable[[Sequence[Tensor]], Mapping[int, Tensor]],
    contexts: Sequence[Any] = (),
) -> dict[str, Tensor]:
    """The gradients of one call by nothing but autograd, given gradients of its outputs.

    Through `.backward()`, because re-entrant checkpointing knows no other way.
    """
    for parameter in model.parameters():
        parameter.grad = None
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(without_fast_attention())
        with torch.enable_grad():
            outputs = tensors_in(model(*call[0], **call[1]))
            wanted = cotangents(outputs)
            pairs = [(outputs[i], g) for i, g in wanted.items() if outputs[i].requires_grad]
            if pairs:
                tensors, grads = zip(*pairs, strict=True)
                torch.autograd.backward(tensors, grads)
    return {name: p.grad for name, p in names.items() if p.grad is not None}
