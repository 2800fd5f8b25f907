"""`nn.LSTM`, `nn.GRU` and `nn.RNN` in one pass, whatever their layers and directions.

A layer multiplies its input and its state by a weight each, at every time step. Both are linear
maps, whose inputs and output gradients tell every sample's gradient. Only the state's map needs one
step after the other. Sequences stay packed: a step has the rows of those that last so long.

Shapes: B samples, N time steps of all samples together, D inputs, H units, G gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from shuffled_dpsgd.clipping.capture.slot import batch_of, recorder_of, size_of
from shuffled_dpsgd.clipping.rules.attention import ProjectionsSlot

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch

# The maps of a layer in one direction: from the input, from the state, and to a narrower state.
_MAPS = ("ih", "hh", "hr")


class Run(NamedTuple):
    """One layer in one direction: the rows of each time step, and the weights of its state.

    `steps` has a slice and its length for each step, in the order of the direction. Biases and
    `narrow`, the map to a narrower state, may be missing.
    """

    mode: str
    steps: list[tuple[slice, int]]
    hh: Tensor
    state_bias: Tensor | None
    narrow: Tensor | None


class RecurrenceFunction(torch.autograd.Function):
    """All time steps of one direction of one layer; the backward records its linear maps."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        state_BH: Tensor,
        memory_BH: Tensor,
        place: int,
        packing: PackedSequence,
        slot: RecurrentSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.place, ctx.packing, ctx.slot, ctx.batch = place, packing, slot, batch
        ih, hh, bias, state_bias, narrow = slot.weights(place, x_ND)
        run = ctx.run = Run(slot.layer.mode, slot.steps(place, packing), hh, state_bias, narrow)
        if bias is not None and run.mode != "GRU":
            bias = bias + state_bias
        last, memory = state_BH.clone(), memory_BH.clone()
        kept = _CELLS[run.mode][0](run, F.linear(x_ND, ih, bias), last, memory)
        ctx.save_for_backward(x_ND, ih, *kept)
        return kept[0], last, memory

    @staticmethod
    def backward(ctx: Any, g_NH: Tensor, last_BH: Tensor, memory_BH: Tensor) -> Any:
        slot, (x_ND, ih, *kept) = ctx.slot, ctx.saved_tensors
        last, memory = last_BH.clone(), memory_BH.clone()
        found = _CELLS[ctx.run.mode][1](ctx.run, kept, g_NH, last, memory)
        pairs = ((x_ND, found[0]), (kept[1], found[1]), found[2:])
        for part, pair in enumerate(pairs, len(_MAPS) * ctx.place):
            if part in slot.parts:
                padded = [_padded(tensor, ctx.packing) for tensor in pair]
                recorder_of(slot).record(ctx.batch, slot, padded, part)
        grad_x = found[0] @ ih if ctx.needs_input_grad[0] else None
        return grad_x, last, memory, None, None, None, None, None


def _plain(run: Run, sums: Tensor, state: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    before = torch.empty_like(sums)
    for rows, n in run.steps:
        before[rows] = state[:n]
        sums[rows].addmm_(state[:n], run.hh.t())
        state[:n] = sums[rows].tanh_() if run.mode == "RNN_TANH" else sums[rows].relu_()
    return sums, before


def _plain_backward(
    run: Run, kept: Sequence[Tensor], grad: Tensor, state: Tensor, _: Tensor
) -> tuple[Tensor, ...]:
    out = kept[0]
    slopes = 1 - out.square() if run.mode == "RNN_TANH" else (out > 0).to(out.dtype)
    _unroll(run, slopes.unsqueeze(1), grad, state)
    return slopes, slopes


def _gru(run: Run, sums: Tensor, state: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    """Gates r, z and n, where r scales what the state adds to n."""
    out, before, added = (torch.empty_like(sums[:, : state.shape[1]]) for _ in range(3))
    for rows, n in run.steps:
        before[rows] = state[:n]
        products = F.linear(state[:n], run.hh, run.state_bias).chunk(3, 1)
        r, z, new = sums[rows].chunk(3, 1)
        r.add_(products[0]).sigmoid_()
        z.add_(products[1]).sigmoid_()
        added[rows] = products[2]
        new.addcmul_(r, products[2]).tanh_()
        state[:n] = out[rows] = torch.lerp(new, state[:n], z)
    return out, before, added, sums


def _gru_backward(
    run: Run, kept: Sequence[Tensor], grad: Tensor, state: Tensor, _: Tensor
) -> tuple[Tensor, ...]:
    _, before, added, gates = kept
    r, z, new = gates.chunk(3, 1)
    to_new = (1 - z) * (1 - new.square())
    of_state = (to_new * added * r * (1 - r), (before - new) * z * (1 - z), to_new * r)
    slopes = torch.stack((to_new, *of_state), 1)
    _unroll(run, slopes, grad, state, z)
    return slopes[:, [1, 2, 0]].flatten(1), slopes[:, 1:].flatten(1)


def _unroll(
    run: Run, slopes: Tensor, grad: Tensor, state: Tensor, carry: Tensor | None = None
) -> None:
    """Go back through time: each slope becomes the gradient of the sum that it belongs to.

    `slopes` (N, G, H) are derivatives of the next state by the sums inside the gates; those that
    the state's own map adds to come last. `carry` is the share of a state that the next one keeps.
    """
    gates = len(run.hh) // state.shape[1]
    for rows, n in reversed(run.steps):
        g = state[:n].add_(grad[rows])
        slopes[rows].mul_(g.unsqueeze(1))
        if carry is not None:
            g.mul_(carry[rows])
        g.addmm_(slopes[rows, -gates:].flatten(1), run.hh, beta=int(carry is not None))


def _lstm(run: Run, sums: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
    """Gates i, f, g and o."""
    memories, bent, wide = sums.new_empty(3, len(sums), memory.shape[1]).unbind()
    before = sums.new_empty(len(sums), state.shape[1])
    out = wide if run.narrow is None else torch.empty_like(before)
    for rows, n in run.steps:
        before[rows], memories[rows] = state[:n], memory[:n]
        i, f, g, o = sums[rows].addmm_(state[:n], run.hh.t()).chunk(4, 1)
        for gate in (i, f, o):
            gate.sigmoid_()
        memory[:n].mul_(f).addcmul_(i, g.tanh_())
        torch.mul(o, torch.tanh(memory[:n], out=bent[rows]), out=wide[rows])
        if run.narrow is not None:
            torch.mm(wide[rows], run.narrow.t(), out=out[rows])
        state[:n] = out[rows]
    return out, before, memories, bent, wide, sums


def _lstm_backward(
    run: Run, kept: Sequence[Tensor], grad: Tensor, state: Tensor, memory: Tensor
) -> tuple[Tensor, ...]:
    out, _, memories, bent, wide, gates = kept
    i, f, g, o = gates.chunk(4, 1)
    # The first three lead to the memory, the last to the state.
    parts = (g * i * (1 - i), memories * f * (1 - f), i * (1 - g.square()), bent * o * (1 - o))
    slopes, to_memory = torch.stack(parts, 1), o * (1 - bent.square())
    narrowed = torch.empty_like(out)
    for rows, n in reversed(run.steps):
        g_state = state[:n].add_(grad[rows])
        if run.narrow is not None:
            narrowed[rows] = g_state
            g_state = g_state @ run.narrow
        g_memory = memory[:n].addcmul_(g_state, to_memory[rows])
        slopes[rows, :3].mul_(g_memory.unsqueeze(1))
        slopes[rows, 3].mul_(g_state)
        g_memory.mul_(f[rows])
        torch.mm(slopes[rows].flatten(1), run.hh, out=state[:n])
    return slopes.flatten(1), slopes.flatten(1), wide, narrowed


_CELLS = {
    "RNN_TANH": (_plain, _plain_backward),
    "RNN_RELU": (_plain, _plain_backward),
    "GRU": (_gru, _gru_backward),
    "LSTM": (_lstm, _lstm_backward),
}


class RecurrentSlot(ProjectionsSlot):
    """A stack of recurrent layers, in one direction or both."""

    kind = "recurrent"

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.layer = cast(nn.RNNBase, self.module)
        self.batch_axis = 0 if self.layer.batch_first else 1
        self.directions = ("", "_reverse")[: 1 + self.layer.bidirectional]
        layers = range(self.layer.num_layers)
        self.suffixes = [f"_l{i}{direction}" for i in layers for direction in self.directions]
        names = [(f"weight_{m}{end}", f"bias_{m}{end}") for end in self.suffixes for m in _MAPS]
        self.parts = {i: pair for i, pair in enumerate(names) if {*pair} & self.names.keys()}

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether all its parameters are its own, and nothing wraps them."""
        names = {name for name, _ in module.named_parameters()}
        return names == {*cast(nn.RNNBase, module)._flat_weights_names}

    def names_of(self, part: int) -> tuple[str, str]:
        return self.parts[part]

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(input, hx)
        batch = batch_of(self)
        if self.recorder.batch is not None:
            batch.calls[self.index] += len(self.parts) - 1
        x = self._packed(input, size_of(batch))
        data, finals = self._run(x, self._states(hx, x), batch)
        lasts = [torch.stack(parts) for parts in zip(*finals, strict=True)]
        if x.unsorted_indices is not None:
            lasts = [last.index_select(1, x.unsorted_indices) for last in lasts]
        final = (lasts[0], lasts[1]) if self.layer.mode == "LSTM" else lasts[0]
        if isinstance(input, PackedSequence):
            return x._replace(data=data), final
        out_TBH = data.unflatten(0, (len(x.batch_sizes), -1))
        return out_TBH.transpose(0, 1) if self.layer.batch_first else out_TBH, final

    def _run(
        self, x: PackedSequence, states: Sequence[Tensor], batch: CapturedBatch
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The outputs of the last layer, and the final states of all."""
        data, finals = x.data, []
        anchor = recorder_of(self).anchor
        for first in range(0, len(self.suffixes), len(self.directions)):
            if first and self.layer.dropout:
                # Drawn for the same rows in the same order as PyTorch does on a CPU.
                data = F.dropout(data, self.layer.dropout, self.layer.training)
            outs = []
            for place in range(first, first + len(self.directions)):
                start = [state[place] for state in states]
                found = RecurrenceFunction.apply(data, *start, place, x, self, batch, anchor)
                outs.append(found[0])
                finals.append(found[1:])
            data = torch.cat(outs, -1)
        return data, finals

    def weights(self, place: int, like: Tensor) -> list[Any]:
        """The weights of a layer in a direction, in the precision of its input."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        found = [self.parameters.get(f"{name}{self.suffixes[place]}") for name in names]
        return [None if p is None else p.to(like.dtype) for p in found]

    def steps(self, place: int, x: PackedSequence) -> list[tuple[slice, int]]:
        """For each time step its rows, and how many sequences last so long."""
        ends, sizes = x.batch_sizes.cumsum(0).tolist(), x.batch_sizes.tolist()
        found = [(slice(end - n, end), n) for end, n in zip(ends, sizes, strict=True)]
        return found[::-1] if self.suffixes[place].endswith("_reverse") else found

    def _packed(self, x: Tensor | PackedSequence, size: int) -> PackedSequence:
        """The input with its time steps in one axis, in the precision of the surrounding cast."""
        if isinstance(x, Tensor):
            if x.dim() != 3:
                raise self.refuse_batch_axis(size, x.shape)
            x_BTD = self.over_batch(x.transpose(0, self.batch_axis), size)
            x = PackedSequence(
                x_BTD.transpose(0, 1).flatten(0, 1), torch.full((x_BTD.shape[1],), size)
            )
        if int(x.batch_sizes[0]) != size:
            raise self.refuse_batch_axis(size, x.data.shape)
        if not torch.is_autocast_enabled(x.data.device.type) or x.data.dtype is torch.float64:
            return x
        return x._replace(data=x.data.to(torch.get_autocast_dtype(x.data.device.type)))

    def _states(self, given: Any, x: PackedSequence) -> list[Tensor]:
        """State and memory at the start, for each direction; zeros where none are given."""
        size, layer = int(x.batch_sizes[0]), self.layer
        shape = len(self.suffixes), size
        widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)
        zeros = [x.data.new_zeros(*shape, width) for width in widths]
        states = [given] if isinstance(given, Tensor) else list(given or zeros)
        for state in states:
            if state.shape[:-1] != shape:
                raise self.refuse_batch_axis(size, state.shape)
        states = [state.to(x.data.dtype) for state in states]
        if x.sorted_indices is not None:
            states = [state.index_select(1, x.sorted_indices) for state in states]
        return [*states, *zeros[len(states) :]]


def _padded(data_NH: Tensor, x: PackedSequence) -> Tensor:
    """(B, T, H), the samples in their own order, with zeros after the last time step of each."""
    return pad_packed_sequence(x._replace(data=data_NH), batch_first=True)[0]
