"""Half-precision copies of linear layers' parameters for one forward under autocast.

Autocast would cast each weight when its layer is called. Here all of them are cast together when
the forward begins: the same numbers, in two operations instead of hundreds. A weight whose rows do
not fill whole blocks (a vocabulary of 50,257) gets rows of zeros added, because matrix products of
odd size run several times slower on tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping import kernels
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.rules.linear import LinearSlot


class HalfCopies:
    """Casts the parameters of a model's linear layers together."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = [slot for slot in slots if isinstance(slot, LinearSlot)]
        self._padded: dict[int, int] = {}
        self._key: tuple[torch.dtype, list[int]] | None = None
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def make(self, dtype: torch.dtype, *, reuse: bool) -> dict[int, Tensor]:
        """Copies of the float32 parameters as they are now, by the id of the parameter.

        With `reuse` they overwrite the last copies. That is allowed once no backward can need
        those any more.
        """
        sources = self._sources()
        ids = [id(parameter) for parameter in sources]
        if not reuse or (dtype, ids) != self._key:
            self._key, self._copies = (dtype, ids), _memory_for(sources, self._padded, dtype)
        filled = [
            copy if copy.shape == parameter.shape else copy[: parameter.shape[0]]
            for copy, parameter in zip(self._copies, sources, strict=True)
        ]
        kernels.copy_all(filled, sources)
        return dict(zip(ids, self._copies, strict=True))

    def _sources(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        self._padded.clear()
        for slot in self._slots:
            for key in ("weight", "bias"):
                parameter = slot.parameters[key]
                if parameter is not None and parameter.dtype is torch.float32:
                    found[id(parameter)] = parameter
                    if slot.padded_outputs != slot.outputs:
                        self._padded[id(parameter)] = slot.padded_outputs
        return list(found.values())


def _memory_for(
    tensors: Sequence[Tensor], padded_rows: Mapping[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Uninitialised memory for copies; those with `padded_rows` end in rows of zeros."""
    made = []
    for tensor in tensors:
        rows = padded_rows.get(id(tensor))
        if rows is not None:
            padded = tensor.new_empty((rows, *tensor.shape[1:]), dtype=dtype, requires_grad=False)
            padded[tensor.shape[0] :].zero_()
            made.append(padded)
        else:
            made.append(torch.empty_like(tensor, dtype=dtype, requires_grad=False))
    return made
