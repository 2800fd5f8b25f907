"""Book-keeping during a backward: who records, when the backward is over, what must not happen.

The recorder is what slots see of the engine. It opens a `CapturedBatch` when the model is called,
files the entries of that batch as its backward runs, and asks autograd to call back at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry, Pending
from shuffled_dpsgd.clipping.capture.captures import Capture, UnsummedNorm
from shuffled_dpsgd.clipping.capture.operator import add_sink, record
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.errors import UnsupportedModuleError

# Norm layers wait for each other until their inputs and gradients take this many bytes.
_MOST_WAITING = 1 << 29


class CaptureRecorder:
    """Files captures under the batch whose backward runs.

    `sum_early(pending)` is asked when norm layers hold much memory, and `finish(batch)` called once
    after the outermost backward. `batch` is the batch of the forward that is running, or None.
    `latest` is the batch of the last forward. `anchor` is a number that every recorded call takes
    as an input: it has the call differentiated where nothing before it is trained.
    """

    def __init__(self, finish: Callable[[CapturedBatch], None]) -> None:
        self.sum_early: Callable[[Pending], None]
        self.finish = finish
        self.batch: CapturedBatch | None = None
        self.latest: CapturedBatch | None = None
        self.slots: list[Slot] = []
        self.axis_checked = False
        # Set while a check computes gradients that must not be recorded.
        self.muted = False
        self.anchor = torch.zeros((), requires_grad=True)
        self.handle = add_sink(self)
        self._running: CapturedBatch | None = None

    def use_device(self, device: torch.device) -> None:
        """Keep the anchor where the model is."""
        if self.anchor.device != device:
            self.anchor = torch.zeros((), device=device, requires_grad=True)

    def open(self, batch: CapturedBatch) -> None:
        """A forward of the model begins. What an interrupted backward left is dropped."""
        self._running = None
        self.batch = self.latest = batch

    def close_forward(self) -> None:
        """The forward is over; later calls of layers must be recomputations."""
        self.batch = None

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

    def record(
        self, batch: CapturedBatch, slot: Slot, found: Sequence[Tensor | None], part: int = 0
    ) -> Tensor | None:
        """Pass on a call's tensors from its backward; a compiler gets a gradient for the anchor."""
        tensors = [tensor for tensor in found if tensor is not None]
        if torch.compiler.is_compiling():
            # Dynamo traces a backward where its forward is called, so this is the call's number.
            return record(self.handle, slot.index, part, batch.calls[slot.index], tensors)
        self.pass_on(batch, slot, lambda: slot.captured(part, tensors))
        return None

    def pass_on(self, batch: CapturedBatch, slot: Slot, capture: Callable[[], Capture]) -> None:
        """Give a capture to the schedule, made in full precision; not for traced backwards."""
        if self._running is not batch:
            self._join(batch)
        if torch.is_grad_enabled():
            raise UnsupportedModuleError(
                "",
                expected="a first-order backward",
                got="backward(create_graph=True)",
                remedy="per-sample clipping of higher derivatives is not supported",
            )
        if batch.size == 0:
            return
        if torch.is_autocast_enabled(batch.device):
            with torch.autocast(batch.device, enabled=False):
                self._file(batch, slot, capture())
        else:
            self._file(batch, slot, capture())

    def _file(self, batch: CapturedBatch, slot: Slot, capture: Capture) -> None:
        """Keep a call for the end; a norm layer's only one, all its own, for one launch of many."""
        kept = batch.pending
        is_alone = not slot.is_shared and batch.calls[slot.index] == 1 and len(slot.names) == 2
        if type(capture) is UnsummedNorm and is_alone:
            kept.unsummed.append(Entry(slot, capture))
            kept.unsummed_bytes += capture.x_BTD.nbytes + capture.g_BTD.nbytes
            if kept.unsummed_bytes > _MOST_WAITING:
                self.sum_early(kept)
        else:
            kept.entries[slot.group].append(Entry(slot, capture))

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
        if batch is None or call > batch.calls[index] or key in batch.compiled.recorded:
            raise UnsupportedModuleError(
                slot.path,
                expected="one backward per forward of the compiled model, in turn",
                got="a backward of an earlier forward",
                remedy="call backward after each forward; the sums add up",
            )
        batch.compiled.recorded.add(key)
        self.pass_on(batch, slot, lambda: slot.captured(part, tensors))

    def _join(self, batch: CapturedBatch) -> None:
        _refuse_misuse(batch, self._running)
        self._running = batch
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        batch, self._running = self._running, None
        self.anchor.grad = None
        if batch is not None:
            with torch.no_grad(), torch.autocast(batch.device, enabled=False):
                self.finish(batch)


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
        self._recorder.pass_on(batch, slot, lambda: slot.heard(batch.size, x, g))
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
