"""The definition of a clipped sum: one sample at a time, with plain autograd.

Fact established here: a record moves the sum by at most `clip_norm`. Each sample's gradient over
all trainable parameters is multiplied by a factor that brings its norm to `clip_norm` at most, and
a sample whose gradient is not finite contributes zero. Everything faster is a plug-in that must
deliver the same sums, and the referee compares (`referee.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import require

# Keeps the factor of automatic clipping finite (Bu et al. 2023).
AUTOMATIC_STABILITY = 0.01


class ClippedSums(Protocol):
    """What delivers clipped sums: the definition below, or a faster engine."""

    @property
    def sample_norms(self) -> Tensor:
        """(B,) norms, before clipping, of all samples since the last reset."""

    def clipped_sum(self) -> Mapping[str, Tensor]:
        """The sum of clipped per-sample gradients since the last reset, by parameter name."""

    def lifted(self) -> AbstractContextManager[None]:
        """Inside, the model runs as its owner wrote it, and nothing is recorded."""

    def reset(self) -> None:
        """Forget norms and sums."""


def clip_factor(norm: float, bound: float, clip: str = "flat") -> float:
    """What a sample's gradient of this norm is multiplied by.

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(math.inf, 1.0)
    (0.25, 1.0, 0.0)
    """
    if not math.isfinite(norm):
        return 0.0
    if clip == "none":
        return 1.0
    if clip == "automatic":
        return bound / (norm + AUTOMATIC_STABILITY)
    return min(1.0, bound / norm) if norm > 0 else 1.0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the sums of a parameter are kept in: float64 for float64, else float32."""
    require(dtype.is_floating_point, "dtype", "floating point", dtype)
    return torch.float64 if dtype == torch.float64 else torch.float32


class PlainClipping:
    """Clipped sums by the definition: `add` one sample's loss after the other.

    `groups` are the parameter names clipped together under "per-layer", each group to
    clip_norm / sqrt(number of groups), so that the whole has norm clip_norm at most.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clip_norm: float = 1.0,
        clip: str = "flat",
        groups: Iterable[Iterable[str]] | None = None,
    ) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        whole = [list(self._named)]
        self._groups = whole if clip != "per-layer" else [list(names) for names in groups or ()]
        is_whole = sorted(chain(*self._groups)) == sorted(self._named)
        require(is_whole, "groups", "every trainable parameter in one group", self._groups)
        self._bound = clip_norm / math.sqrt(len(self._groups))
        self._clip = clip
        self.reset()

    def reset(self) -> None:
        """Forget norms and sums."""
        self._norms: list[float] = []
        self._sums = {
            name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in self._named.items()
        }

    def add(self, loss: Tensor) -> None:
        """Add the clipped gradient of one sample's loss to the sums."""
        found = torch.autograd.grad(loss, list(self._named.values()), allow_unused=True)
        self.add_gradient({n: g for n, g in zip(self._named, found, strict=True) if g is not None})

    def add_gradient(self, grads: Mapping[str, Tensor]) -> None:
        """Clip one sample's gradient and add it; parameters it does not name are zero."""
        self._norms.append(float(joint_norm(grads.values())))
        for names in self._groups:
            own = {name: grads[name] for name in names if name in grads}
            factor = clip_factor(float(joint_norm(own.values())), self._bound, self._clip)
            for name, grad in own.items() if factor > 0.0 else ():
                self._sums[name] += factor * grad

    @property
    def sample_norms(self) -> Tensor:
        """(B,) norms, before clipping, of all samples since the last reset."""
        dtypes = [total.dtype for total in self._sums.values()]
        return torch.tensor(self._norms, dtype=dtypes[0] if dtypes else None)

    def clipped_sum(self) -> dict[str, Tensor]:
        """The sums themselves: a later `add` adds to them until `reset`."""
        return dict(self._sums)

    def lifted(self) -> AbstractContextManager[None]:
        """Nothing is attached to the model, so there is nothing to take off."""
        return nullcontext()


def joint_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all tensors as one vector, in double precision.

    `vector_norm` in float32 is off by a thousandth for long vectors on a CPU. Sums of squares by
    pieces are right to 1e-8 there.
    """
    flats = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    if not flats:
        return torch.zeros((), dtype=torch.float64)
    if any(flat.device.type != "cpu" for flat in flats):
        norms = torch._foreach_norm(flats, 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms))
    pieces = (piece for flat in flats for piece in flat.split(1 << 16))
    return torch.stack([piece.square().sum().double() for piece in pieces]).sum().sqrt()
