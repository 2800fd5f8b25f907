"""Small captures, put where those of the step before lay.

Work is replayed only where everything lies as it did when it was recorded (`replay`). Large tensors
do, for nobody else asks the allocator for their sizes. Small ones share their memory with whatever
else is small, and land here and there; a single one would have the whole step done the slow way. To
copy them takes one launch, so they get places of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from operator import attrgetter

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import Batch

# The allocator of CUDA keeps tensors up to this size together.
SMALL_BYTES = 1 << 20
# What all of them may take; the rest stays where it is.
MAX_BYTES = 1 << 26
# Views of the memory are kept for so many kinds of batches; to make them takes long.
MAX_LAYOUTS = 64
# As far apart as two tensors of the allocator.
_STEP = 512
_kind = attrgetter("dtype", "shape")


class Shelf:
    """Memory for one batch's small captures at a time: batches alike in shape lie alike in it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._stream: int | None = None
        self._layouts: OrderedDict[Hashable, list[Tensor]] = OrderedDict()

    def take(self, batch: Batch) -> None:
        """Replace the batch's small captures by copies on the shelf.

        Those of the batch before are overwritten, so its work must have been asked for.
        """
        entries, late = batch.settling.all_entries(), batch.compiled.late
        compiled = () if late is None else late.tensors
        tensors = [tensor for entry in entries for tensor in entry.capture.tensors()]
        small = self._fitting([*tensors, *(tensor for tensor in compiled if tensor is not None)])
        if not small:
            return
        if small[0].is_cuda:
            # By its number: a stream itself says of None that it is not unlike it.
            self._keep_to(torch.cuda.current_stream(small[0].device).cuda_stream)
        copies = self._copies(small)
        places = dict(zip(map(id, small), copies, strict=True))
        for entry in entries:
            entry.capture.move(places)
        if late is not None:
            late.tensors = tuple([places.get(id(tensor), tensor) for tensor in compiled])

    def _keep_to(self, stream: int) -> None:
        """Start anew on another stream, where work of the last one may not be done yet.

        Memory that is let go of waits for its stream by itself.
        """
        if stream != self._stream:
            self._stream, self._memory = stream, None
            self._layouts.clear()

    def _fitting(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The small ones of one device, each once, as long as there is room.

        A part of a larger tensor lies where that lies; only what is spread over the batch does not.
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
        """Parts of the memory for these, one after the other; more memory if that is needed."""
        sizes = [_rounded(tensor.nbytes) for tensor in tensors]
        device, total = tensors[0].device, sum(sizes)
        memory = self._memory
        if memory is None or memory.device != device or memory.nbytes < total:
            # Whatever lay in the old memory will lie elsewhere, and is recorded anew.
            self._layouts.clear()
            size = min(2 * total, MAX_BYTES)
            memory = self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(memory[:total].split(sizes), tensors, strict=True)
        ]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _STEP) * _STEP
