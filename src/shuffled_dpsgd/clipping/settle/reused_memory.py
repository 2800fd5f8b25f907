"""Sums that were forgotten, to be used again once nobody else has them.

Tensors handed out belong to whoever has them. Who has them is told by the counts that Python and
PyTorch keep; where those cannot be read, nothing is used again.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

_HOLDERS_ARE_KNOWN = hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


@functools.cache
def counts_are_understood() -> bool:
    """Whether this release of PyTorch counts the holders of a `Shell`'s tensors as expected."""
    if not _HOLDERS_ARE_KNOWN:
        return False
    shell = _small_shell()
    kept: object = shell.sums()["one"]
    held = shell.is_free()
    kept = shell.sums()["one"][:1]
    viewed = shell.is_free()
    kept = shell.buffer
    whole = shell.is_free()
    del kept
    return shell.is_free() and not (held or viewed or whole)


def _small_shell() -> Shell:
    buffer = torch.zeros(4)
    with torch.no_grad():
        one, two = buffer.split(2)
        return Shell(buffer, {"one": one, "two": two.view(1, 2)})


class Spare:
    """Sums on a CPU, whose memory is used again.

    An operating system hands memory out page by page, and a CPU waits for it as long as for half
    of the products written there.
    """

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self._sums = dict(sums)
        # Held as the sums are, and never given to anybody.
        self._sums[""] = torch.empty(1)

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """The memory of this sum, unless it is held elsewhere or does not fit."""
        if not _HOLDERS_ARE_KNOWN or name not in self._sums:
            return None
        if self._held(name) != self._held(""):
            return None
        found = self._sums.pop(name)
        return found if (found.shape, found.dtype) == (shape, dtype) else None

    def _held(self, name: str) -> tuple[int, int, int]:
        """References from Python, from C++, and to the memory itself."""
        from_cpp = self._sums[name]._use_count()  # type: ignore[attr-defined]
        return sys.getrefcount(self._sums[name]), from_cpp, _uses_of_memory(self._sums[name])


class Shell:
    """The sums cut from one buffer of an accelerator: tensors that outlive their memory.

    To cut hundreds of views takes a host longer than to issue all the work that fills them. So the
    tensors are kept, their memory is given back between two uses, and they get new memory for the
    next; but only where nobody else has any of them. To be made only if `counts_are_understood`.
    """

    def __init__(self, buffer: Tensor, sums: dict[str, Tensor]) -> None:
        self.buffer = buffer
        self._names = list(sums)
        # The last view is held as the others are, a second buffer with a view as the first is; and
        # neither is ever given to anybody.
        self._other = torch.empty(1)
        with torch.no_grad():
            self._views = [*sums.values(), buffer[:0]]
            self._other_views = [self._other[:0]]
        self._nbytes = buffer.untyped_storage().nbytes()
        self._hollow = False

    def sums(self) -> dict[str, Tensor]:
        """The sums by name."""
        return dict(zip(self._names, self._views, strict=False))

    def let_go(self) -> None:
        """Give the memory back if nobody else has it."""
        if not self._hollow and self.is_free():
            self.buffer.untyped_storage().resize_(0)
            self._hollow = True

    def take(self, *, zero: bool) -> bool:
        """Have memory again, of zeros or whatever it holds; False if somebody has the tensors."""
        if not self._hollow and not self.is_free():
            return False
        if self._hollow:
            self.buffer.untyped_storage().resize_(self._nbytes)
            self._hollow = False
        if zero:
            self.buffer.zero_()
        return True

    def is_free(self) -> bool:
        """Whether nobody else has any of the tensors, a view of them, or the buffer."""
        return (
            self.buffer.untyped_storage().resizable()
            and _uses_of_memory(self.buffer) - len(self._views)
            == _uses_of_memory(self._other) - len(self._other_views)
            and sys.getrefcount(self.buffer) == sys.getrefcount(self._other)
            and len({*map(sys.getrefcount, self._views)}) == 1
            and len({*map(Tensor._use_count, self._views)}) == 1  # type: ignore[attr-defined]
        )


def _uses_of_memory(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
