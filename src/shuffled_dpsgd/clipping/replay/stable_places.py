"""Small captures are copied to places that stay the same from step to step.

Work is replayed only where every tensor lies as it did when the work was recorded (`recordings`).
Large tensors do, because nobody else asks the allocator for their sizes. Small ones share their
memory with whatever else is small and land elsewhere in every step. A single one that has moved
would keep the whole step from being replayed. Copying them all takes one launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from operator import attrgetter

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch

# The allocator of CUDA keeps tensors up to this size together.
SMALL_BYTES = 1 << 20
# What all copies together may take; tensors beyond that stay where they are.
MAX_BYTES = 1 << 26
# Views of the memory take long to make, so those of so many kinds of batches are kept.
MAX_LAYOUTS = 64
# The distance that the allocator itself keeps between tensors.
_STEP = 512
_kind = attrgetter("dtype", "shape")


class StablePlaces:
    """Memory for the small captures of one batch at a time.

    Two batches whose captures have the same shapes get the same places.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._stream: int | None = None
        self._layouts: OrderedDict[Hashable, list[Tensor]] = OrderedDict()

    def move(self, batch: CapturedBatch) -> None:
        """Replace the batch's small captures by copies in stable places.

        This overwrites those of the batch before, whose work must have been issued by now.
        """
        entries = batch.settling.all_entries()
        small = self._fitting(tensor for entry in entries for tensor in entry.capture.tensors())
        if not small:
            return
        if small[0].is_cuda:
            # By number: `stream != None` is False for a CUDA stream.
            self._keep_to(torch.cuda.current_stream(small[0].device).cuda_stream)
        copies = self._copies(small)
        places = dict(zip(map(id, small), copies, strict=True))
        for entry in entries:
            entry.capture.move(places)

    def _keep_to(self, stream: int) -> None:
        """Start with new memory on another stream, as work on the last one may still be running.

        The allocator gives the old memory away only after the work of its stream.
        """
        if stream != self._stream:
            self._stream, self._memory = stream, None
            self._layouts.clear()

    def _fitting(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The small tensors of one device, each once, up to `MAX_BYTES`.

        A view of a larger tensor lies where that one lies and is left alone, unless it is expanded:
        what is spread over the batch may be a view of something small.
        """
        found: dict[int, Tensor] = {}
        room, device = MAX_BYTES, None
        for tensor in tensors:
            nbytes = tensor.nbytes
            if not 0 < nbytes <= SMALL_BYTES or id(tensor) in found:
                continue
            device = tensor.device if device is None else device
            if tensor.device == device and (tensor.is_contiguous() or 0 in tensor.stride()):
                room -= _rounded(nbytes)
                if room < 0:
                    break
                found[id(tensor)] = tensor
        return list(found.values())

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        key = (tensors[0].device, *map(_kind, tensors))
        copies = self._layouts.get(key)
        if copies is None:
            copies = self._layouts[key] = self._views(tensors)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for copy, tensor in zip(copies, tensors, strict=True):
            if tensor.is_contiguous():
                targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
                targets.append(copy)
                sources.append(tensor)
            else:
                copy.copy_(tensor)
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources)
        return copies

    def _views(self, tensors: list[Tensor]) -> list[Tensor]:
        """Parts of the memory for these tensors, one after the other; grows it if needed."""
        sizes = [_rounded(tensor.nbytes) for tensor in tensors]
        device, total = tensors[0].device, sum(sizes)
        memory = self._memory
        if memory is None or memory.device != device or memory.nbytes < total:
            # Everything moves to the new memory, and its work is recorded anew.
            self._layouts.clear()
            size = min(2 * total, MAX_BYTES)
            memory = self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(memory[:total].split(sizes), tensors, strict=True)
        ]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _STEP) * _STEP
