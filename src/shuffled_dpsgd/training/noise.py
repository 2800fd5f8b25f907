"""The only place where noise is drawn.

Gaussian noise is added to a tensor in place, through a scratch buffer of bounded size, in float32
or better: never in bfloat16, whose eight bits would let the noisy sum betray the sum it hides.

On the CPU the draw is numpy's ziggurat, whose tail is exact; torch's float32 Box-Muller there
never exceeds 5.8 standard deviations, which a model of 1e8 coordinates would notice. Floating
point noise of any kind is not the real-valued Gaussian of the theorems: an adversary who reads
every low-order bit of a released sum is outside the model (Mironov 2012).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.randomness import RandomStreams

_SCRATCH_ELEMENTS_CPU = 1 << 18
_SCRATCH_ELEMENTS_ACCELERATOR = 1 << 24
_WIDE = (torch.float32, torch.float64)


class _Piece(NamedTuple):
    """A part of a tensor small enough for one draw, and what its stream is keyed by."""

    tensor: torch.Tensor
    std: float
    key: tuple[int, int]


class NoiseSource(Protocol):
    """Adds noise to named tensors in place."""

    def add_(
        self, tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float], *, step: int
    ) -> None: ...


class GaussianNoise:
    """Independent Gaussian noise for every coordinate, from the run's own streams.

    On the CPU every piece of a tensor has a stream of its own, keyed by (run, step, position of
    the tensor among the names given, position of the piece), so what it receives depends neither
    on the other tensors nor on the number of threads that share the work. On an accelerator all
    tensors of one standard deviation are served in turn from one stream keyed by (run, step): a
    stream for each would cost more time than the noise.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams

    def add_(
        self, tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float], *, step: int
    ) -> None:
        """Add N(0, stds[name]²) to every coordinate of every tensor; a std of 0 adds nothing."""
        if set(tensors) != set(stds):
            missing = sorted(set(tensors) ^ set(stds))
            raise InvalidArgumentError(
                "stds", expected="one standard deviation per tensor", got=f"mismatch at {missing}"
            )
        for name, tensor in tensors.items():
            if tensor.dtype not in _WIDE or not tensor.is_contiguous():
                raise InvalidArgumentError(
                    name, expected="a contiguous float32 or float64 sum", got=tensor.dtype
                )
        together: dict[tuple[torch.device, torch.dtype, float], list[torch.Tensor]] = {}
        on_cpu: list[_Piece] = []
        for index, (name, tensor) in enumerate(tensors.items()):
            std = stds[name]
            if std == 0.0 or tensor.numel() == 0:
                continue
            if tensor.device.type == "cpu":
                pieces = enumerate(tensor.view(-1).split(_SCRATCH_ELEMENTS_CPU))
                on_cpu += [_Piece(piece, std, (index, part)) for part, piece in pieces]
            else:
                together.setdefault((tensor.device, tensor.dtype, std), []).append(tensor)
        self._add_on_cpu(on_cpu, step=step)
        for index, ((_, _, std), group) in enumerate(together.items()):
            self._add_on_accelerator(group, std, step=step, index=index)

    def _add_on_cpu(self, pieces: list[_Piece], *, step: int) -> None:
        def add(piece: _Piece) -> None:
            rng = self._streams.numpy("noise", step, *piece.key)
            target = piece.tensor.detach().numpy()
            draw = rng.standard_normal(target.size, dtype=target.dtype)
            draw *= piece.std
            target += draw

        threads = min(torch.get_num_threads(), len(pieces))
        if threads < 2:
            for piece in pieces:
                add(piece)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(add, pieces))

    def _add_on_accelerator(
        self, tensors: list[torch.Tensor], std: float, *, step: int, index: int
    ) -> None:
        generator = self._streams.torch("noise", step, index, device=tensors[0].device)
        for parts in _packed(tensors, _SCRATCH_ELEMENTS_ACCELERATOR):
            size = sum(part.numel() for part in parts)
            draw = torch.empty(size, dtype=parts[0].dtype, device=parts[0].device)
            draw.normal_(generator=generator)
            draws = torch._utils._unflatten_dense_tensors(draw, parts)
            torch._foreach_add_(parts, list(draws), alpha=std)


def _packed(tensors: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, cut where they are large, in lists of at most `size` elements."""
    packed: list[torch.Tensor] = []
    room = size
    for tensor in tensors:
        small = tensor.numel() <= size
        for piece in (tensor,) if small else tensor.view(-1).split(size):
            if piece.numel() > room:
                yield packed
                packed, room = [], size
            packed.append(piece)
            room -= piece.numel()
    if packed:
        yield packed
