"""Memory of sums that were cleared, used again once nobody else holds the tensors.

Tensors that were handed out belong to whoever holds them. Holders are found by the reference counts
of Python and PyTorch. Where those cannot be read, nothing is used again.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

_HOLDERS_ARE_KNOWN = hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


@functools.cache
def counts_are_understood() -> bool:
    """Whether this release of PyTorch counts holders as `ReusableBuffer` expects.

    Tried on a small buffer: each way to hold one of its tensors must be noticed.
    """
    if not _HOLDERS_ARE_KNOWN:
        return False
    reusable = _small_buffer()
    kept: object = reusable.sums()["one"]
    held = reusable.is_free()
    kept = reusable.sums()["one"][:1]
    viewed = reusable.is_free()
    kept = reusable.buffer
    whole = reusable.is_free()
    kept = reusable.buffer.untyped_storage()
    stored = reusable.is_free()
    del kept
    return reusable.is_free() and not (held or viewed or whole or stored)


def _small_buffer() -> ReusableBuffer:
    buffer = torch.zeros(4)
    with torch.no_grad():
        one, two = buffer.split(2)
        return ReusableBuffer(buffer, {"one": one, "two": two.view(1, 2)})


class ReusableTensors:
    """Cleared sums on a CPU, each with memory of its own that may be used again.

    An operating system hands out memory page by page. Waiting for fresh pages takes a CPU half as
    long as computing the products that are written there.
    """

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self._sums = dict(sums)
        # Never handed out, so its counts are those of a tensor that nobody else holds.
        self._sums[""] = torch.empty(1)

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """The memory of this sum, unless it is held elsewhere or does not fit."""
        if not _HOLDERS_ARE_KNOWN or name not in self._sums:
            return None
        if self._held(name) != self._held(""):
            return None
        found = self._sums.pop(name)
        return found if (found.shape, found.dtype) == (shape, dtype) else None

    def _held(self, name: str) -> tuple[int, int, tuple[int, int]]:
        """References from Python, from C++, and to the memory itself."""
        from_cpp = self._sums[name]._use_count()  # type: ignore[attr-defined]
        return sys.getrefcount(self._sums[name]), from_cpp, _uses_of_memory(self._sums[name])


class ReusableBuffer:
    """The sums cut from one buffer of an accelerator, kept as tensors while their memory is freed.

    Cutting hundreds of views takes the host longer than issuing the work that fills them. So the
    views are kept. Their memory is freed between two uses, and they get new memory for the next.
    Both happen only while nobody else holds any of them. To be made only if
    `counts_are_understood`.
    """

    def __init__(self, buffer: Tensor, sums: dict[str, Tensor]) -> None:
        self.buffer = buffer
        self._names = list(sums)
        # Never handed out: a last view of the buffer, and a second buffer with one view. They show
        # what the counts of the others are while nobody else holds them.
        self._other = torch.empty(1)
        with torch.no_grad():
            self._views = [*sums.values(), buffer[:0]]
            self._other_views = [self._other[:0]]
        self._nbytes = buffer.untyped_storage().nbytes()
        self._is_empty = False

    def sums(self) -> dict[str, Tensor]:
        """The sums by name."""
        return dict(zip(self._names, self._views, strict=False))

    def let_go(self) -> None:
        """Free the memory if nobody else holds it."""
        if not self._is_empty and self.is_free():
            self.buffer.untyped_storage().resize_(0)
            self._is_empty = True

    def take(self, *, zero: bool) -> bool:
        """Have memory again, with zeros or anything in it; False if somebody holds the tensors."""
        if not self._is_empty and not self.is_free():
            return False
        if self._is_empty:
            self.buffer.untyped_storage().resize_(self._nbytes)
            self._is_empty = False
        if zero:
            self.buffer.zero_()
        return True

    def is_free(self) -> bool:
        """Whether nobody else holds any of the tensors, a view of them, or the buffer."""
        uses, stored = _uses_of_memory(self.buffer)
        other_uses, other_stored = _uses_of_memory(self._other)
        return (
            self.buffer.untyped_storage().resizable()
            and uses - len(self._views) == other_uses - len(self._other_views)
            and stored == other_stored
            and sys.getrefcount(self.buffer) == sys.getrefcount(self._other)
            and len({*map(sys.getrefcount, self._views)}) == 1
            and len({*map(Tensor._use_count, self._views)}) == 1  # type: ignore[attr-defined]
        )


def _uses_of_memory(tensor: Tensor) -> tuple[int, int]:
    """How many hold the memory, and how many the one Python object that stands for it.

    All calls of `untyped_storage` share that object, and it counts once however many have it.
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)
