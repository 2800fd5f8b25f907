"""Book-keeping during a backward: who records, when the backward is over, what must not happen.

The recorder is what slots see of the engine. It opens a `CapturedBatch` when the model is called,
passes on the entries of that batch as its backward runs, and asks autograd to call back at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, CompiledForward, Entry, Late, Phase
from shuffled_dpsgd.clipping.capture.captures import Capture
from shuffled_dpsgd.clipping.capture.operator import add_sink, record
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.capture.taps import Signature, Taps, key_of, make_taps
from shuffled_dpsgd.errors import UnsupportedModuleError

# Taps compile a model again, so they are made for one of its first batches or for none.
LEARNING_BATCHES = 16


class CaptureRecorder:
    """Passes entries on under the batch whose backward runs.

    `receive(batch, entry)` is called for every recorded call, `finish(batch)` once after the
    outermost backward. `batch` is the batch of the forward that is running, or None. `latest` is
    the batch of the last forward. `may_tap` allows taps, which deliver all captures of a compiled
    backward at its end.
    """

    def __init__(
        self,
        *,
        receive: Callable[[CapturedBatch, Entry], None],
        finish: Callable[[CapturedBatch], None],
    ) -> None:
        self.receive = receive
        self.finish = finish
        self.batch: CapturedBatch | None = None
        self.latest: CapturedBatch | None = None
        self.slots: list[Slot] = []
        self.axis_checked = False
        # Set while a check computes gradients that must not be recorded.
        self.muted = False
        self.may_tap = False
        # The latest input of a linear layer in a traced forward, and the layer that records it.
        self._input: Tensor | None = None
        self._input_owner = 0
        self.tap = torch.zeros((), requires_grad=True)
        self._taps: Taps | None = None
        # The rows of the stack of taps, taken apart by the traced forward that is running.
        self._rows: tuple[Tensor, ...] = ()
        self._last_signature: Signature | None = None
        self._num_traced = 0
        self.handle = add_sink(self)
        self._running: CapturedBatch | None = None

    def use_device(self, device: torch.device) -> None:
        """Keep the taps where the model is."""
        if self.tap.device != device:
            self.tap = torch.zeros((), device=device, requires_grad=True)
            self._taps = self._last_signature = None

    def open(self, batch: CapturedBatch, signature: Signature | None = None) -> None:
        """A forward of the model begins. What an interrupted backward left is dropped.

        A traced forward gives its `signature`; if there are taps for it, they are used.
        """
        self._running = None
        compiled = batch.compiled
        compiled.signature = signature
        if signature is not None and self._taps is not None:
            compiled.taps = self._taps if self._taps.signature == signature else None
            self._rows = () if compiled.taps is None else compiled.taps.rows()
        self.batch = self.latest = batch

    def close_forward(self) -> None:
        """The forward is over; later calls of layers must be recomputations."""
        self.batch = None
        self._input = None
        self._rows = ()

    def input_part(self, batch: CapturedBatch, slot: Slot, x: Tensor) -> int:
        """Under a compiler: zero for a call that records its input, below zero if another does.

        Query, key and value read one input. If each layer recorded it, it would be written and kept
        three times. So only the first one does, the owner, and the others get -1 - owner's index.
        """
        owner = self._input_owner
        if x is self._input and batch.calls[owner] == batch.calls[slot.index] == 1:
            return -1 - owner
        self._input, self._input_owner = x, slot.index
        return 0

    def recomputed_batch(self, path: str) -> CapturedBatch:
        """The batch of a layer that is called outside the model's forward.

        That is right only inside a backward, where activation checkpointing calls layers again.
        Joining the backward that runs *now* keeps one batch in one piece even when re-entrant
        checkpointing nests a second backward inside it.
        """
        if torch._C._current_graph_task_id() < 0 or self.latest is None:
            raise UnsupportedModuleError(
                path,
                expected="layers called by the model's own forward",
                got="a call from outside it",
                remedy="call the model the engine was built on, or build the engine on a module "
                "whose forward does all that you need",
            )
        if self._running is not self.latest:
            self._join(self.latest)
        return self.latest

    def taps_of(self, batch: CapturedBatch, slot: Slot, part: int = 0) -> tuple[Tensor, ...]:
        """Further inputs for a slot's function: taps, or the one tensor that the operator needs."""
        taps = batch.compiled.taps
        if taps is None:
            return (self.tap,)
        key = key_of(slot.index, part, batch.calls[slot.index])
        return taps.of(key, self._rows) or (self.tap,)

    def record(
        self, batch: CapturedBatch, slot: Slot, found: Sequence[Tensor | None], part: int = 0
    ) -> tuple[Tensor | None, ...]:
        """Pass on the tensors found by one call of one slot; called from the slot's backward.

        Returns the gradients of what `taps_of` gave to the call. Those of taps are the captured
        tensors themselves. The operator's is a number nobody reads. Outside a compiler it is None.
        """
        tensors = [tensor for tensor in found if tensor is not None]
        if torch.compiler.is_compiling():
            # Dynamo traces a backward where its forward is called, so this is the call's number.
            call = batch.calls[slot.index]
            taps = batch.compiled.taps
            tapped = 0 if taps is None else taps.count(key_of(slot.index, part, call))
            if tapped > 0:
                # Fewer taps than tensors where another call gives the input.
                return tuple(tensors[-tapped:])
            return (record(self.handle, slot.index, part, call, tensors),)
        self.pass_on(batch, slot, slot.captured(part, tensors))
        return (None,)

    def pass_on(self, batch: CapturedBatch, slot: Slot, capture: Capture) -> None:
        """Give an entry to whoever settles the batch; never called by a traced backward."""
        if self._running is not batch:
            self._join(batch)
        if torch.is_grad_enabled():
            _refuse_higher_derivatives()
        if torch.is_autocast_enabled(batch.device):
            with torch.autocast(batch.device, enabled=False):
                self.receive(batch, Entry(slot, capture))
        else:
            self.receive(batch, Entry(slot, capture))

    def listen(self, out: Tensor, batch: CapturedBatch, slot: Slot, x: Tensor | None) -> Tensor:
        """Record `x` and the gradient of `out` when that arrives; returns `out`.

        For ordinary eager operations on detached parameters: autograd's own backward then runs
        undisturbed, at a fraction of the cost of a Python function per layer.
        """
        # A hook on a view is lost, silently, when the view is changed in place; one on its base
        # is not.
        base = out._base
        _hook(out if base is None else base, Listener(self, batch, slot, x))
        return out

    def record_traced(self, index: int, part: int, call: int, tensors: list[Tensor]) -> None:
        """Pass on one call that a compiled backward has handed to the operator."""
        batch, slot, key = self.latest, self.slots[index], (index, part, call)
        if batch is None or call > batch.calls[index] or key in batch.compiled.captures:
            raise _not_in_turn(slot.path, "a backward of an earlier forward")
        batch.compiled.captures[key] = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        node = torch._C._current_autograd_node()
        # Some backends compile nothing: autograd then runs the functions of a graph one by one.
        if node.name() == "CompiledFunctionBackward":
            batch.compiled.graphs.add(id(node))
        self.pass_on(batch, slot, slot.captured(part, tensors))

    def deliver(self, grads: tuple[Tensor | None, ...]) -> None:
        """Pass on the gradients of all taps: one compiled backward's captures."""
        batch = self.latest
        taps = None if batch is None else batch.compiled.taps
        if batch is None or taps is None or batch is not self._running:
            raise _not_in_turn("", "captures of another")
        batch.compiled.tapped = True
        calls = [(self.slots[index], part, place) for (index, part, _), place in taps.order]
        late = Late(calls, grads, stacked=taps.stack is not None)
        if not any(slot.stores for slot, _, _ in calls):
            batch.compiled.late = late
            return
        # Storing gradients frees the captures they replace, so that is not put off.
        with torch.autocast(batch.device, enabled=False):
            for entry in late.entries():
                self.receive(batch, entry)

    def _join(self, batch: CapturedBatch) -> None:
        _refuse_misuse(batch, self._running)
        self._running = batch
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        batch, self._running = self._running, None
        self.tap.grad = None
        if batch is None:
            return
        compiled = batch.compiled
        if compiled.taps is not None and not compiled.tapped:
            raise _not_in_turn("", "a backward that stops before the model's first layers")
        with torch.no_grad(), torch.autocast(batch.device, enabled=False):
            self.finish(batch)
        if self.may_tap and self._taps is None and compiled.signature is not None:
            self._learn(compiled, compiled.signature)

    def _learn(self, compiled: CompiledForward, signature: Signature) -> None:
        """Make taps for the first signature that comes twice in a row soon, and for no other.

        Other signatures go on through the operator: taps for each would compile the model again
        and again. So does a model in pieces: each piece would have to know the taps of the others.
        """
        self._num_traced += 1
        is_soon = self._num_traced <= LEARNING_BATCHES
        if is_soon and signature == self._last_signature and len(compiled.graphs) < 2:
            small = {slot.index for slot in self.slots if slot.captures_sums}
            self._taps = make_taps(compiled.captures, small, signature, self.tap, self.handle)
        self._last_signature = signature


class Listener:
    """Waits for the gradient of one call's output, and holds the call's input until then.

    A hook lives as long as the graph, and the graph as long as somebody keeps the loss. The input
    is let go earlier, or two batches of activations would be in memory during the next forward.
    """

    __slots__ = ("_batch", "_recorder", "_slot", "_version", "_x")

    def __init__(
        self, recorder: CaptureRecorder, batch: CapturedBatch, slot: Slot, x: Tensor | None
    ) -> None:
        self._recorder = recorder
        self._batch = batch
        self._slot = slot
        self._x = x
        self._version = 0 if x is None else x._version

    def __call__(self, g: Tensor) -> None:
        batch, slot, x = self._batch, self._slot, self._x
        if batch.size == 0 or self._recorder.muted:
            return
        if x is not None and x._version != self._version:
            raise UnsupportedModuleError(
                slot.path,
                expected="an input that stays as it was until the backward",
                got="an input changed in place",
                remedy="replace the in-place operation after this module by an ordinary one",
            )
        if batch.closed:
            _refuse_misuse(batch, None)
        self._recorder.pass_on(batch, slot, slot.heard(batch.size, x, g))
        if batch.phase is not Phase.NORMS:
            self._x = None


class _ListenerLast(OrderedDict[int, Any]):
    """A tensor's hooks, with the listener (under the key -1) always last.

    A parameter's gradient is computed from what all hooks on the output leave of its gradient,
    those of the model's author included. A listener that ran earlier would see another gradient.
    """

    __slots__ = ()

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if key != -1 and -1 in self:
            # Autograd goes by the order of insertion, which `move_to_end` leaves alone.
            super().__setitem__(-1, self.pop(-1))


def _hook(tensor: Tensor, listener: Listener) -> None:
    """`tensor.register_hook(listener)` without making a handle, which nobody would keep.

    The handles of all layers are enough objects to start Python's garbage collector in every step,
    and after a compilation its heap is large.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(listener)
        return
    hooks = _ListenerLast()
    # Handles of hooks added later count from zero. The override is bypassed because this runs
    # once per layer and step.
    OrderedDict.__setitem__(hooks, -1, listener)
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


def _not_in_turn(path: str, got: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        path,
        expected="one backward per forward of the compiled model, in turn",
        got=got,
        remedy="call backward after each forward; the sums add up",
    )


def _refuse_misuse(batch: CapturedBatch, running: CapturedBatch | None) -> None:
    if running is not None:
        raise UnsupportedModuleError(
            "",
            expected="one forward of the model per backward",
            got="a loss over several forwards",
            remedy="call backward after each forward (the sums add up), or let one module make "
            "both calls",
        )
    if batch.closed:
        raise UnsupportedModuleError(
            "",
            expected="one backward per forward",
            got="a second backward through the same forward",
            remedy="add the losses of one batch before calling backward; clipped one by one they "
            "would let a sample contribute more than clip_norm",
        )


def _refuse_higher_derivatives() -> None:
    raise UnsupportedModuleError(
        "",
        expected="a first-order backward",
        got="backward(create_graph=True)",
        remedy="per-sample clipping of higher derivatives is not supported",
    )
