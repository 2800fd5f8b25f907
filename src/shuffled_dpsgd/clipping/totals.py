"""The running sums and norms since the last reset."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Sums of so many elements, or a multiple, start where kernels can read them in wide words.
_ALIGNMENT = 64


class Totals:
    """Running results since the last reset.

    The sums of all parameters on one device lie in one allocation, made when the first of them is
    needed: filling one buffer with zeros is one operation, filling hundreds is hundreds.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sum of each parameter, float64 for float64 parameters and float32 for others."""
        if not self._sums:
            self._sums = self._zeros()
        return self._sums

    def clear(self) -> None:
        """Forget everything; tensors handed out before are left alone."""
        self._sums = {}
        self.norms = []

    def _zeros(self) -> dict[str, Tensor]:
        places: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, parameter in self._parameters.items():
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            places.setdefault((parameter.device, wide), []).append(name)
        found: dict[str, Tensor] = {}
        for (device, dtype), names in places.items():
            # Whole blocks first, so that the odd sizes of small parameters misalign no other.
            names.sort(key=lambda name: self._parameters[name].numel() % _ALIGNMENT != 0)
            parameters = [self._parameters[name].detach() for name in names]
            buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=device)
            views = torch._utils._unflatten_dense_tensors(buffer, parameters)
            found.update(zip(names, views, strict=True))
        return {name: found[name] for name in self._parameters}
