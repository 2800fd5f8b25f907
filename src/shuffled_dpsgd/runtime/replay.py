"""A batch run once more, by nothing but the model and autograd: what sums are compared with.

A witness listens to the model. Of a batch that is going to be looked at it keeps the inputs, the
states of all random generators before the forward, and the gradients that arrive at the outputs
from the loss. A replay runs the forward again, with whatever clips attached taken off and the
generators put back, so that dropout draws the same masks. The gradient of Σ w_i·loss_i then follows
by one backward in which row i of the outputs' gradients is multiplied by w_i. With all weights but
one zero this is the gradient of a single sample, at the real shape and precision of its batch. With
the records in another order it is the same sample among others.

Whatever a replay changes is put back: generators, buffers, attributes of modules and gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_flatten, tree_unflatten

from shuffled_dpsgd.errors import CannotReplayError
from shuffled_dpsgd.runtime.attention import allowed_kernels, same_attention
from shuffled_dpsgd.runtime.hooks import put_first
from shuffled_dpsgd.runtime.loss_graph import LossGraph, every_backward
from shuffled_dpsgd.runtime.output_tensors import batch_axes_of, tensors_in, with_tensors
from shuffled_dpsgd.runtime.random_states import RandomStates
from shuffled_dpsgd.runtime.shards import held

Pull = Callable[[list[Tensor], list[Tensor]], dict[str, Tensor]]
# Takes whole gradients by name while a backward runs, where weights are spread over processes.
TakeGradients = Callable[[Callable[[str, Tensor], None]], AbstractContextManager[None]]
# Entries of a larger tensor that are enough to see whether it is another one.
_MOST_ENTRIES = 1 << 12
_MOST_OUTPUTS = 1 << 20
# Of a sum, what rounding may have had a part in.
_SMALL_REST = 1e-2


@dataclass(kw_only=True)
class Call:
    """One forward of the model: how it was called, and what came back from the loss."""

    args: Any
    kwargs: Mapping[str, Any]
    versions: list[int]
    before: RandomStates
    autocast: tuple[str, bool, torch.dtype]
    attention: frozenset[SDPBackend]
    cotangents: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    is_random: bool = False
    # Rows after so many only fill the batch up, and may hold anything.
    counted: int | None = None

    @classmethod
    def now(cls, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Call:
        """A call that is about to be made."""
        kind = next(model.parameters()).device.type
        return cls(
            args=args,
            kwargs=dict(kwargs),
            versions=versions_of(args, kwargs),
            before=RandomStates.of_model(model),
            autocast=(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            attention=allowed_kernels(),
        )

    def cast(self) -> AbstractContextManager[Any]:
        """The autocast that the call was made under."""
        kind, enabled, dtype = self.autocast
        return torch.autocast(kind, dtype=dtype, enabled=enabled)

    @property
    def has_numbers(self) -> bool:
        """Whether the loss came out of the model as one number for the whole batch."""
        return any(grad.dim() == 0 for grad in self.cotangents.values())

    def problem(self) -> str | None:
        """Why the batch cannot be run once more, as far as can be told before it is."""
        if self.versions != versions_of(self.args, self.kwargs):
            return "an input of the model was changed in place after the forward"
        if not self.cotangents:
            return "no gradient arrived at an output that could be followed"
        return None


@dataclass(kw_only=True)
class Observed:
    """What some records of a batch gave: rows of outputs, and the sum of their gradients.

    Of large tensors only some entries. A number for the whole batch has no axes.
    """

    values: list[Tensor]
    grads: dict[str, Tensor]


class _Tap(torch.autograd.Function):
    """Passes a tensor on, and keeps the gradient that comes back from outside the model.

    A hook on the tensor itself would also see what comes from inside, where one output is computed
    from another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, kept: dict[int, Tensor]) -> Tensor:
        ctx.place, ctx.kept = place, kept
        # Autograd forbids in-place changes of views that functions return.
        return cast(Tensor, torch.ops.aten._unsafe_view(x, x.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.kept.setdefault(ctx.place, grad.detach())
        return grad, None, None


class Witness:
    """Keeps the latest call of a model while somebody `wants` it.

    They are all asked before every forward that can be followed by a backward, other than those
    made for checks. `inputs` learns from every such call what has the batch on its first axis.
    `losses` sees what then goes backward; `own` leaves belong to whatever else is attached.
    """

    def __init__(
        self,
        model: nn.Module,
        is_checking: Callable[[], bool],
        own: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self.call: Call | None = None
        self.wants: list[Callable[[Any, Mapping[str, Any]], bool]] = []
        self.inputs = BatchedInputs()
        self.losses = LossGraph(model, own)
        self._model = model
        self._is_checking = is_checking
        self._attached = ExitStack()
        self._replaying = False

    def listen(self) -> None:
        """Attach to the model; before the first forward of whatever else is attached."""
        self._attached.callback(put_first(self._model, self._before).remove)
        self._attached.callback(self._model.register_forward_hook(self._after).remove)
        self._attached.enter_context(every_backward(self._look))

    def stop(self) -> None:
        """Leave nothing on the model."""
        self._attached.close()

    def _look(self, losses: Sequence[Tensor]) -> None:
        if not self._replaying and not self._is_checking():
            self.losses.look(losses)

    def ask(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether anybody wants the call that is about to be made."""
        answers = [wants(args, kwargs) for wants in self.wants]
        return any(answers)

    def _is_idle(self) -> bool:
        inside_backward = torch._C._current_graph_task_id() >= 0
        mine = self._replaying or self._is_checking()
        return mine or not torch.is_grad_enabled() or inside_backward

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not self._is_idle():
            self.losses.note_inputs(tree_flatten((args, dict(kwargs)))[0])
            wanted = self.ask(args, kwargs)
            self.call = Call.now(self._model, args, kwargs) if wanted else None

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._is_idle():
            return None
        if self.call is not None:
            output = self._tapped(self.call, output)
        self.losses.note_outputs(tensors_in(output))
        return None if self.call is None else output

    @staticmethod
    def _tapped(call: Call, output: Any) -> Any:
        taps: dict[int, Tensor] = {}
        call.is_random = call.before.of_torch_alone() != call.before.again().of_torch_alone()
        for place, leaf in enumerate(tensors_in(output)):
            if leaf.requires_grad:
                call.outputs[place] = leaf.detach()
                taps[id(leaf)] = cast(Tensor, _Tap.apply(leaf, place, call.cotangents))
        return with_tensors(output, taps)

    @contextmanager
    def replay(
        self,
        call: Call,
        rows: int,
        lifted: Any,
        pull: Pull | None = None,
        take: TakeGradients | None = None,
    ) -> Iterator[Rerun]:
        """Run the batch of `call` once more; `lifted` takes the engine off the model meanwhile.

        Where weights are spread over processes, `pull` takes outputs and their gradients back to
        the parameters of all processes together, or `take` to those of this process alone.
        """
        self._replaying = True
        try:
            with (
                lifted,
                call.cast(),
                torch.enable_grad(),
                same_attention(call.attention),
                without_a_trace(self._model),
                # The real forward has given them.
                warnings.catch_warnings(action="ignore"),
            ):
                yield Rerun(self._model, call, rows, inputs=self.inputs, pull=pull, take=take)
        finally:
            self._replaying = False


class Rerun:
    """One batch, run again by plain autograd."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        rows: int,
        *,
        inputs: BatchedInputs,
        pull: Pull | None = None,
        take: TakeGradients | None = None,
    ) -> None:
        self.reading = 0
        self._model = model
        self._call = call
        self._rows = rows
        self._inputs = inputs
        self._pull = pull
        self._take = take
        self._outputs: dict[int, Tensor] | None = None
        counted = rows if call.counted is None else call.counted
        self._whole = [row if row < counted else 0 for row in range(rows)]

    @property
    def has_numbers(self) -> bool:
        """Whether the loss came out of the model as one number for the whole batch."""
        return self._call.has_numbers

    @property
    def num_readings(self) -> int:
        """In how many ways the batch may lie in the outputs; `reading` says which is taken."""
        grads = self._call.cotangents.values()
        return max([1, *(len(batch_axes_of(grad, self._rows)) for grad in grads)])

    def gradient(self, weights: Tensor, *, last: bool = False) -> dict[str, Tensor]:
        """The gradient of Σ weights_i·loss_i. After the `last` one the forward's graph is freed."""
        if self.has_numbers:
            return self._one_by_one(weights)
        outputs = self._forward() if self._outputs is None else self._outputs
        found = self._backward(outputs, self._cotangents(outputs, weights), retain=not last)
        self._outputs = None if last else outputs
        return found

    def cancels(self) -> bool:
        """Whether the gradient of all samples is a small rest of much larger terms.

        These show once the gradients that come back from the loss have random signs.
        """
        if self.has_numbers or self._pull is not None:
            return False
        outputs = self._forward()
        grads = self._cotangents(outputs, torch.ones(self._rows))
        signed = {place: grad * torch.randn_like(grad).sign() for place, grad in grads.items()}
        large, rest = (
            torch.stack(torch._foreach_norm(list(found.values()))).norm()
            for found in (
                self._backward(outputs, signed, retain=True),
                self._backward(outputs, grads, retain=False),
            )
        )
        return bool(rest < _SMALL_REST * large)

    def _cotangents(self, outputs: dict[int, Tensor], weights: Tensor) -> dict[int, Tensor]:
        places = range(self._rows)
        return {
            place: self._weighted(grad, outputs[place], weights, places, places)
            for place, grad in self._call.cotangents.items()
        }

    def observe(
        self, order: Sequence[int], kept: Sequence[int], gradients: bool = True
    ) -> Observed:
        """What the records at the `kept` places give in a batch with its records in this `order`.

        Raises:
            CannotReplayError: the outputs are not those of the batch.
        """
        found: dict[str, Tensor] = {}

        def take(name: str, grad: Tensor) -> None:
            found[name] = some_entries(grad, _MOST_ENTRIES)

        spread = nullcontext() if self._take is None or not gradients else self._take(take)
        weights = torch.ones(self._rows, dtype=torch.float64)
        values, grads = [], {}
        with torch.set_grad_enabled(gradients), spread:
            outputs = self._run(order)
            for place, grad in self._call.cotangents.items():
                out = outputs[place]
                grads[place] = self._weighted(grad, out, weights, order, kept)
                values.append(self._watched(out, grad, order, kept))
            if gradients:
                for name, grad in self._backward(outputs, grads, retain=False).items():
                    take(name, grad)
        return Observed(values=values, grads=found)

    def invent_gradients(self, *, numbers: bool) -> None:
        """Random gradients at all outputs, for a call whose loss could not be followed.

        With `numbers`, a single number among the outputs is what the backward began at.
        """
        with torch.no_grad():
            outputs = self._run(range(self._rows), every=True)
        ends = {i: out for i, out in outputs.items() if out.is_floating_point()}
        single = {i: torch.ones_like(out) for i, out in ends.items() if not out.dim()}
        several = {
            i: torch.randn_like(out) for i, out in ends.items() if batch_axes_of(out, self._rows)
        }
        self._call.cotangents.update(single if numbers and single else several)

    def _forward(self) -> dict[int, Tensor]:
        """The outputs of the batch as it was, under the same random numbers."""
        self._call.before.restore()
        found = self._run(self._whole)
        for place, out in found.items() if self._call.is_random else ():
            # Other layers may draw them in another order.
            before = self._call.outputs[place].double()
            if (out.detach().double() - before).norm() > 0.05 * before.norm():
                raise CannotReplayError(
                    "the model draws other random numbers when it is run once more"
                )
        return found

    def _run(self, order: Sequence[int], *, every: bool = False) -> dict[int, Tensor]:
        args, kwargs = self._inputs.take(self._call.args, self._call.kwargs, self._rows, order)
        outputs = tensors_in(self._model(*args, **kwargs))
        if every:
            return dict(enumerate(outputs))
        if any(place >= len(outputs) for place in self._call.cotangents):
            raise CannotReplayError(f"{len(outputs)} outputs of a batch, fewer than before")
        return {place: outputs[place] for place in self._call.cotangents}

    def _backward(
        self, outputs: dict[int, Tensor], grads: dict[int, Tensor], *, retain: bool
    ) -> dict[str, Tensor]:
        """Through `.backward()`, because re-entrant checkpointing knows no other way."""
        ends = [outputs[place] for place in grads if outputs[place].requires_grad]
        given = [grads[place] for place in grads if outputs[place].requires_grad]
        if self._pull is not None:
            return self._pull(ends, given)
        for parameter in self._model.parameters():
            parameter.grad = None
        if ends:
            torch.autograd.backward(ends, given, retain_graph=retain)
        if self._take is not None:
            return {}
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
        return {name: held(grad) for name, grad in found.items()}

    def _one_by_one(self, weights: Tensor) -> dict[str, Tensor]:
        """Where the model returns one number for the batch: every sample alone."""
        if self._call.is_random or self._pull is not None:
            raise CannotReplayError(
                "the model returns one number for the batch and draws random numbers, or is sharded"
            )
        total: dict[str, Tensor] = {}
        for sample in weights.nonzero().flatten().tolist():
            self._call.before.restore()
            outputs = self._run([sample])
            grads = {place: self._call.cotangents[place] * weights[sample] for place in outputs}
            for name, grad in self._backward(outputs, grads, retain=False).items():
                total[name] = grad if name not in total else total[name] + grad
        return total

    # --- rows ------------------------------------------------------------------------------------

    def _weighted(
        self, grad: Tensor, out: Tensor, weights: Tensor, order: Sequence[int], kept: Sequence[int]
    ) -> Tensor:
        """The gradient of an output for records in this order: zero but for the `kept` places.

        Each is multiplied by the weight of its record. What is padding for all may be cut off.
        """
        if grad.dim() == 0:
            return grad.to(out.dtype)
        axis, chosen = self._axis(grad), [order[place] for place in kept]
        rows = by_sample(grad, axis, self._rows)[chosen]
        factors = weights[chosen].to(rows).view(-1, *[1] * (rows.dim() - 1))
        found = rows.new_zeros(len(order), *rows.shape[1:])
        # Zero times infinity is no zero.
        found[list(kept)] = torch.where(factors == 0, 0.0, rows * factors)
        found = found.flatten(0, 1).movedim(0, axis)
        fitted = _fitted(found, out.shape)
        if fitted is not found and fitted.count_nonzero() != found.count_nonzero():
            raise _other_shape(out, grad)
        return fitted.to(out.dtype)

    def _watched(self, out: Tensor, grad: Tensor, order: Sequence[int], kept: Sequence[int]) -> Any:
        """The rows of an output at some places, as far as the loss depends on them."""
        if out.dim() == 0:
            return out.detach()
        axis = self._axis(grad)
        shape = list(grad.shape)
        shape[axis] = shape[axis] // self._rows * len(order)
        rows = by_sample(_fitted(out.detach(), torch.Size(shape)), axis, len(order))[list(kept)]
        live = by_sample(grad, axis, self._rows)[[order[place] for place in kept]] != 0
        live = live.any(-1, keepdim=True) if live.dim() > 3 else live
        return some_entries(torch.where(live, rows, 0.0), _MOST_OUTPUTS, rows=len(kept))

    def _axis(self, grad: Tensor) -> int:
        axes = batch_axes_of(grad, self._rows)
        if not axes:
            raise CannotReplayError(
                f"an output of shape {tuple(grad.shape)} has no axis for the {self._rows} samples"
            )
        return axes[min(self.reading, len(axes) - 1)]


class BatchedInputs:
    """Learns which tensors of a call have the batch on their first axis.

    A mask of shape (T, T) looks like it whenever T happens to be the batch size. Once it has been
    seen with another length, it is known to be shared by all samples.
    """

    def __init__(self) -> None:
        self._shared: set[tuple[Any, int]] = set()

    def note(self, args: Any, kwargs: Mapping[str, Any], size: int) -> None:
        """Look at one more call with a batch of `size`."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != size:
                self._shared.add((spec, place))

    def take(
        self, args: Any, kwargs: Mapping[str, Any], size: int, samples: Sequence[int]
    ) -> tuple[Any, dict[str, Any]]:
        """The call with these samples only; its tensors share no graph with the original ones."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        rows = list(samples)
        is_whole = rows == list(range(size))

        def taken(place: int, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            found = leaf.detach()
            has_batch = leaf.dim() > 0 and leaf.shape[0] == size
            if has_batch and not is_whole and (spec, place) not in self._shared:
                found = found[rows]
            return found.requires_grad_(leaf.requires_grad)

        chosen = [taken(place, leaf) for place, leaf in enumerate(leaves)]
        return tree_unflatten(chosen, spec)


def by_sample(tensor: Tensor, axis: int, size: int) -> Tensor:
    """(size, rows, ...): the batch on the first axis, the rows of a sample on the second."""
    moved = tensor.movedim(axis, 0)
    if not size or len(moved) % size:
        raise CannotReplayError(f"an output of shape {tuple(tensor.shape)} for {size} samples")
    return moved.unflatten(0, (size, -1))


def some_entries(tensor: Tensor, most: int, *, rows: int = 1) -> Tensor:
    """(rows, ...) entries of a tensor: all of a small one, every n-th of a large one, n odd."""
    flat = tensor.detach().reshape(rows, -1)
    every = flat.numel() // most
    return flat.clone() if every < 2 else flat[:, :: every | 1].clone()


def versions_of(args: Any, kwargs: Any) -> list[int]:
    """How often each tensor of a call has been written to."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@contextmanager
def without_a_trace(model: nn.Module) -> Iterator[None]:
    """Put back gradients, buffers, attributes of modules and generators afterwards."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    # What a forward remembers, it may append to a list.
    lists = [(v, v.copy()) for kept in attributes for v in kept.values() if type(v) is list]
    held = [
        (value, value.detach().clone())
        for kept in [*attributes, *(module._buffers for module in modules)]
        for value in kept.values()
        if isinstance(value, Tensor)
    ]
    buffers = [dict(module._buffers) for module in modules]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = RandomStates.of_model(model)
    try:
        yield
    finally:
        states.restore()
        for parameter, grad in grads:
            parameter.grad = grad
        for module, kept, own in zip(modules, attributes, buffers, strict=True):
            for now, before in ((module.__dict__, kept), (module._buffers, own)):
                for key in now.keys() - before.keys():
                    del now[key]
                now.update(before)
        for remembered, entries in lists:
            remembered[:] = entries
        with torch.no_grad():
            for value, copy in held:
                if not torch.equal(value, copy):
                    value.copy_(copy)


def _fitted(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A tensor cut off or filled up with zeros to a shape of as many axes."""
    if tensor.shape == shape:
        return tensor
    if tensor.dim() != len(shape):
        raise _other_shape(tensor, shape)
    found = tensor.new_zeros(shape)
    common = tuple(slice(min(pair)) for pair in zip(tensor.shape, shape, strict=True))
    found[common] = tensor[common]
    return found


def _other_shape(one: Tensor, other: Tensor | torch.Size) -> CannotReplayError:
    shape = other.shape if isinstance(other, Tensor) else other
    return CannotReplayError(
        f"an output of shape {tuple(one.shape)} when the model is run once more, and "
        f"{tuple(shape)} before"
    )
