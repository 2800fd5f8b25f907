"""A batch run once more, by nothing but the model and autograd: what sums are compared with.

A witness listens to the model. Of a batch that is going to be compared it keeps the inputs, the
states of all random generators before the forward, and the gradients that arrive at the outputs
from the loss. A replay runs the forward again, with whatever clips attached taken off and the
generators put back, so that dropout draws the same masks. The gradient of Σ w_i·loss_i then follows
by one backward in which row i of the outputs' gradients is multiplied by w_i. With all weights but
one zero this is the gradient of a single sample, at the real shape and precision of its batch.

Whatever a replay changes is put back: generators and buffers. Gradients of parameters are never
written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.errors import CannotReplayError

Pull = Callable[[list[Tensor], list[Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Generators:
    """States of the generators of torch, NumPy and Python."""

    torch_cpu: Tensor
    torch_device: Tensor | None
    device: torch.device
    numpy: Any
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """The states as they are."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_device=on_device,
            device=device,
            numpy=np.random.get_state(),  # noqa: NPY002
            python=random.getstate(),
        )

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.cuda.set_rng_state(self.torch_device, self.device)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)

    def torch_has_moved(self) -> bool:
        """Whether torch has drawn numbers since."""
        now = Generators.now(self.device)
        same = torch.equal(self.torch_cpu, now.torch_cpu)
        if self.torch_device is not None and now.torch_device is not None:
            same = same and torch.equal(self.torch_device, now.torch_device)
        return not same


@dataclass(kw_only=True)
class Call:
    """One forward of the model: how it was called, and what came back from the loss."""

    args: Any
    kwargs: Mapping[str, Any]
    versions: list[int]
    before: Generators
    autocast: tuple[str, bool, torch.dtype]
    cotangents: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    is_random: bool = False

    def problem(self) -> str | None:
        """Why the batch cannot be run once more, as far as can be told before it is."""
        if self.versions != versions_of(self.args, self.kwargs):
            return "an input of the model was changed in place after the forward"
        if not self.cotangents:
            return "no gradient arrived at an output that could be followed"
        return None


class _Tap(torch.autograd.Function):
    """Passes a tensor on, and keeps the gradient that comes back from outside the model.

    A hook on the tensor itself would also see what comes from inside, where one output is computed
    from another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, kept: dict[int, Tensor]) -> Tensor:
        ctx.place, ctx.kept = place, kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.kept[ctx.place] = grad.detach()
        return grad, None, None


class Witness:
    """Keeps the latest call of a model while `wants` says that its batch is going to be compared.

    `wants` is asked before every forward that can be followed by a backward, other than those that
    the engine makes for checks of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        wants: Callable[[Any, Mapping[str, Any]], bool],
        is_checking: Callable[[], bool],
    ) -> None:
        self._model = model
        self._wants = wants
        self._is_checking = is_checking
        self._hooks: list[RemovableHandle] = []
        self._replaying = False
        self.call: Call | None = None

    def listen(self) -> None:
        """Attach to the model; before the first forward of whatever else is attached."""
        before = self._model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._hooks = [before, self._model.register_forward_hook(self._after)]

    def stop(self) -> None:
        """Leave nothing on the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.call = None

    def _is_idle(self) -> bool:
        inside_backward = torch._C._current_graph_task_id() >= 0
        mine = self._replaying or self._is_checking()
        return mine or not torch.is_grad_enabled() or inside_backward

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_idle():
            return
        self.call = None
        if self._wants(args, kwargs):
            device = next(self._model.parameters()).device
            kind = device.type
            cast_to = torch.get_autocast_dtype(kind)
            self.call = Call(
                args=args,
                kwargs=dict(kwargs),
                versions=versions_of(args, kwargs),
                before=Generators.now(device),
                autocast=(kind, torch.is_autocast_enabled(kind), cast_to),
            )

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._is_idle() or self.call is None:
            return None
        call = self.call
        call.is_random = call.before.torch_has_moved()
        leaves, structure = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                call.outputs[place] = leaf.detach()
                leaves[place] = cast(Tensor, _Tap.apply(leaf, place, call.cotangents))
        return tree_unflatten(leaves, structure)

    @contextmanager
    def replay(
        self, call: Call, rows: int, lifted: Any, pull: Pull | None = None
    ) -> Iterator[Rerun]:
        """Run the batch of `call` once more, which has `rows` rows; `lifted` is entered for it.

        `pull` takes outputs and their gradients back to the parameters where those are spread over
        processes; by default autograd does.

        Raises:
            CannotReplayError: the call was not kept whole, or its inputs have changed since.
        """
        problem = call.problem()
        if problem is not None:
            raise CannotReplayError(problem)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        now = Generators.now(call.before.device)
        kind, enabled, dtype = call.autocast
        self._replaying = True
        try:
            with lifted, torch.autocast(kind, dtype=dtype, enabled=enabled), torch.enable_grad():
                yield Rerun(self._model, call, rows, pull)
        finally:
            self._replaying = False
            now.restore()
            with torch.no_grad():
                for buffer, kept in buffers:
                    if not torch.equal(buffer, kept):
                        buffer.copy_(kept)


class Rerun:
    """The gradients of one batch, by plain autograd."""

    def __init__(self, model: nn.Module, call: Call, rows: int, pull: Pull | None = None) -> None:
        self._model = model
        self._call = call
        self._rows = rows
        self._pull = pull
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._outputs: dict[int, Tensor] | None = None

    @property
    def has_numbers(self) -> bool:
        """Whether the loss came out of the model as one number for the whole batch."""
        return any(grad.dim() == 0 for grad in self._call.cotangents.values())

    def gradient(self, weights: Tensor, *, last: bool = False) -> dict[str, Tensor]:
        """The gradient of Σ weights_i·loss_i; `last` lets go of the forward."""
        if self.has_numbers:
            return self._one_by_one(weights)
        grads = {
            place: self._weighted(grad, weights) for place, grad in self._call.cotangents.items()
        }
        outputs = self._forward() if self._outputs is None else self._outputs
        found = self._backward(outputs, grads, retain=not last)
        self._outputs = None if last else outputs
        return found

    def _forward(self, args: Any = None, kwargs: Any = None) -> dict[int, Tensor]:
        self._call.before.restore()
        args = _detached(self._call.args if args is None else args)
        kwargs = _detached(self._call.kwargs if kwargs is None else kwargs)
        leaves, _ = tree_flatten(self._model(*args, **kwargs))
        found = {place: leaves[place] for place in self._call.cotangents if place < len(leaves)}
        if len(found) != len(self._call.cotangents):
            raise CannotReplayError("the model returned fewer outputs when it was run once more")
        if self._call.is_random and not self._drew_the_same(found):
            raise CannotReplayError("the model draws other random numbers when it is run once more")
        return found

    def _drew_the_same(self, outputs: dict[int, Tensor]) -> bool:
        """Whether random numbers fell as before: other layers may draw them in another order."""
        for place, output in outputs.items():
            before = self._call.outputs[place].double()
            if (output.detach().double() - before).norm() > 0.05 * before.norm():
                return False
        return True

    def _backward(
        self, outputs: dict[int, Tensor], grads: dict[int, Tensor], *, retain: bool
    ) -> dict[str, Tensor]:
        if any(outputs[place].shape != grad.shape for place, grad in grads.items()):
            raise CannotReplayError("an output has another shape when the model is run once more")
        ends = [outputs[place] for place in grads]
        given = [grads[place].to(outputs[place].dtype) for place in grads]
        if self._pull is not None:
            return self._pull(ends, given)
        found = torch.autograd.grad(
            ends, list(self._named.values()), given, retain_graph=retain, allow_unused=True
        )
        pairs = zip(self._named.items(), found, strict=True)
        return {name: torch.zeros_like(p) if grad is None else grad for (name, p), grad in pairs}

    def _weighted(self, grad: Tensor, weights: Tensor) -> Tensor:
        """The gradient with each sample's rows multiplied by the sample's weight.

        The batch is on the first axis that is as long; or each sample has several rows of axis 0.
        """
        exact = [axis for axis, length in enumerate(grad.shape) if length == self._rows]
        if not exact and grad.shape[0] % self._rows:
            raise CannotReplayError(
                f"an output of shape {tuple(grad.shape)} has no axis for the {self._rows} samples"
            )
        axis = exact[0] if exact else 0
        repeated = weights.repeat_interleave(grad.shape[axis] // self._rows)
        shape = [-1 if place == axis else 1 for place in range(grad.dim())]
        return grad * repeated.to(grad).view(shape)

    def _one_by_one(self, weights: Tensor) -> dict[str, Tensor]:
        """Where the model returns one number for the batch: every sample alone."""
        if self._call.is_random or self._pull is not None:
            raise CannotReplayError(
                "the model returns one number for the batch and draws random numbers, or is sharded"
            )
        total: dict[str, Tensor] = {}
        for sample in weights.nonzero().flatten().tolist():
            outputs = self._forward(
                self._sample(self._call.args, sample), self._sample(self._call.kwargs, sample)
            )
            grads = {place: self._call.cotangents[place] * weights[sample] for place in outputs}
            for name, grad in self._backward(outputs, grads, retain=False).items():
                total[name] = grad if name not in total else total[name] + grad
        return total

    def _sample(self, inputs: Any, sample: int) -> Any:
        def taken(leaf: Any) -> Any:
            has_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self._rows
            return leaf[sample : sample + 1] if has_batch else leaf

        return tree_map(taken, inputs)


def _detached(inputs: Any) -> Any:
    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    return tree_map(cut, inputs)


def versions_of(args: Any, kwargs: Any) -> list[int]:
    """How often each tensor of a call has been written to."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
