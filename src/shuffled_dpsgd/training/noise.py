"""The only place where noise is drawn.

Gaussian noise is added to tensors in place, through scratch buffers of bounded size, in float32
or better: never in bfloat16, whose eight bits would let the noisy sum betray the sum it hides.

The tails are kept: torch's float32 normals stop at 5.8 standard deviations on the CPU and at 6.7
on a GPU, which a model of 1e8 coordinates would notice (`box_muller`, `native_noise`,
`triton_noise`). Floating
point noise of any kind is not the real-valued Gaussian of the theorems: an adversary who reads
every low-order bit of a released sum is outside the model (Mironov 2012).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch

from shuffled_dpsgd.distributed.parts import Place
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.cpu_threads import on_all_threads
from shuffled_dpsgd.runtime.routes import took
from shuffled_dpsgd.training import box_muller, native_noise
from shuffled_dpsgd.training.box_muller import NoisedPart
from shuffled_dpsgd.training.flat import abutting, as_flat
from shuffled_dpsgd.training.noise_route import may_take_c, may_take_kernel
from shuffled_dpsgd.training.randomness import RandomStreams

# From so many numbers on, C is worth compiling.
_LARGE_CPU = 1 << 19
# Large enough that threads seldom wait for the interpreter lock between two operations.
_PIECE_CPU = 1 << 19
_SCRATCH_ELEMENTS_ACCELERATOR = 1 << 24
_WIDE = (torch.float32, torch.float64)
_dtype = attrgetter("dtype")


class Stretch(NamedTuple):
    """Coordinates of one standard deviation that lie side by side.

    `first` is the place of the first among all coordinates of the release on this device and of
    this dtype, in the order of the names: what a coordinate receives depends on its place and on
    nothing about memory.
    """

    flat: torch.Tensor
    std: float
    first: int


class Coordinates(NamedTuple):
    """Stretches on one device and of one dtype, out of `total` coordinates with one key."""

    group: int
    total: int
    stretches: list[Stretch]


class NoiseSource(Protocol):
    """Adds noise to named tensors in place and divides the result."""

    def add_(
        self,
        tensors: Mapping[str, torch.Tensor],
        stds: Mapping[str, float],
        *,
        step: int,
        divide_by: float = 1.0,
    ) -> None: ...


class GaussianNoise:
    """Independent Gaussian noise for every coordinate, from the run's own streams.

    The coordinates of a release are numbered through. On the CPU every 2^19 of them have a stream
    of their own, keyed by (run, step, number of the piece), so that the number of threads that
    share the work changes nothing. Large models have their noise from compiled C, others from
    numpy, which agrees to rounding. On a GPU one kernel turns (key of the step, number of the
    coordinate) into noise; where Triton or float32 is missing, one torch generator per step
    serves all coordinates in turn.

    With `places`, the tensors are parts of a release whose other parts lie elsewhere, and each
    coordinate receives what it would receive in the whole. On the CPU a part draws every piece it
    touches and uses its share of it.
    """

    def __init__(self, streams: RandomStreams, places: Mapping[str, Place] | None = None) -> None:
        self._streams = streams
        self._places = places

    def add_(
        self,
        tensors: Mapping[str, torch.Tensor],
        stds: Mapping[str, float],
        *,
        step: int,
        divide_by: float = 1.0,
    ) -> None:
        """Add N(0, stds[name]²) to every coordinate of every tensor, then divide.

        A std of 0 adds nothing. One pass over memory does both.
        """
        _check(tensors, stds)
        for group, total, stretches in _coordinates(tensors, stds, self._places):
            device, dtype = stretches[0].flat.device, stretches[0].flat.dtype
            if device.type == "cpu":
                self._add_on_cpu(
                    stretches, step=step, index=group, total=total, divide_by=divide_by
                )
            elif dtype == torch.float32 and may_take_kernel(device):
                took("noise", "triton")
                self._add_by_kernel(stretches, step=step, index=group, divide_by=divide_by)
            elif self._places is None:
                took("noise", "torch generator")
                self._add_on_accelerator(stretches, step=step, index=group, divide_by=divide_by)
            else:
                raise _unaddressable(device, dtype)

    def _add_on_cpu(
        self,
        stretches: Sequence[Stretch],
        *,
        step: int,
        index: int,
        total: int,
        divide_by: float,
    ) -> None:
        add_normals = _way_on_cpu(stretches[0].flat.dtype, total)

        def add(piece: int, stretches: list[Stretch]) -> None:
            start = piece * _PIECE_CPU
            noised = [
                NoisedPart(stretch.flat.numpy(), stretch.first - start, stretch.std)
                for stretch in stretches
                if stretch.std
            ]
            if noised:
                rng = self._streams.numpy("noise", step, index, piece)
                add_normals(rng, min(_PIECE_CPU, total - start), noised, divide_by)
            for stretch in stretches:
                if not stretch.std and divide_by != 1.0:
                    stretch.flat.div_(divide_by)

        tasks = deque(_by_piece(stretches, _PIECE_CPU).items())

        def work() -> None:
            while tasks:
                try:
                    task = tasks.popleft()
                except IndexError:  # Another thread took the last one.
                    return
                add(*task)

        on_all_threads(work, most=len(tasks))

    def _add_by_kernel(
        self, stretches: Sequence[Stretch], *, step: int, index: int, divide_by: float
    ) -> None:
        from shuffled_dpsgd.training.triton_noise import add_normal_

        key = self._streams.words("noise", step, index)
        for flat, std, first in stretches:
            add_normal_(flat, key=key, first=first, std=std, divide_by=divide_by)

    def _add_on_accelerator(
        self, stretches: Sequence[Stretch], *, step: int, index: int, divide_by: float
    ) -> None:
        generator = self._streams.torch("noise", step, index, device=stretches[0].flat.device)
        by_std: dict[float, list[torch.Tensor]] = {}
        for stretch in stretches:
            by_std.setdefault(stretch.std, []).append(stretch.flat)
        for std, flats in by_std.items():
            for parts in _packed(flats, _SCRATCH_ELEMENTS_ACCELERATOR):
                if std:
                    size = sum(part.numel() for part in parts)
                    draw = torch.empty(size, dtype=parts[0].dtype, device=parts[0].device)
                    draw.normal_(generator=generator)
                    draws = draw.split([part.numel() for part in parts])
                    torch._foreach_add_(parts, list(draws), alpha=std)
                if divide_by != 1.0:
                    torch._foreach_div_(parts, divide_by)


def _way_on_cpu(dtype: torch.dtype, total: int) -> Callable[..., None]:
    """How a piece is drawn and added; the same on all ranks, since `total` is that of the whole."""
    if dtype != torch.float32:
        took("noise", "ziggurat")
        return box_muller.add_normals
    if total >= _LARGE_CPU and may_take_c():
        took("noise", "c")
        return native_noise.add_normals
    took("noise", "box_muller")
    return box_muller.add_normals


def _check(tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float]) -> None:
    if tensors.keys() != stds.keys():
        missing = sorted(set(tensors) ^ set(stds))
        raise InvalidArgumentError(
            "stds", expected="one standard deviation per tensor", got=f"mismatch at {missing}"
        )
    wide = {*map(_dtype, tensors.values())} <= {*_WIDE}
    if wide and all(map(torch.Tensor.is_contiguous, tensors.values())):
        return
    for name, tensor in tensors.items():
        if tensor.dtype not in _WIDE or not tensor.is_contiguous():
            raise InvalidArgumentError(
                name, expected="a contiguous float32 or float64 sum", got=tensor.dtype
            )


def _coordinates(
    tensors: Mapping[str, torch.Tensor],
    stds: Mapping[str, float],
    places: Mapping[str, Place] | None,
) -> list[Coordinates]:
    """The tensors in order, by device and type, joined where memory and std allow."""
    if places is not None:
        return _placed(tensors, stds, places)
    found: dict[tuple[torch.device, torch.dtype], list[Stretch]] = {}
    in_order = [stds[name] for name in tensors]
    done = 0
    for run in abutting(list(tensors.values()), in_order):
        std, flat = in_order[done], as_flat(run).detach()
        done += len(run)
        if flat.numel() == 0:
            continue
        stretches = found.setdefault((flat.device, flat.dtype), [])
        first = stretches[-1].first + stretches[-1].flat.numel() if stretches else 0
        stretches.append(Stretch(flat, std, first))
    return [
        Coordinates(group, stretches[-1].first + stretches[-1].flat.numel(), stretches)
        for group, stretches in enumerate(found.values())
    ]


def _placed(
    tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float], places: Mapping[str, Place]
) -> list[Coordinates]:
    """As above, for tensors that say themselves which coordinates of the whole they hold."""
    found: dict[int, Coordinates] = {}
    held = [(places[name], stds[name], tensor) for name, tensor in tensors.items()]
    held = [(place, std, tensor) for place, std, tensor in held if tensor.numel()]
    # Neighbours in memory are one stretch only if their numbers are neighbours as well.
    labels = [(p.group, std, p.first - int(t.storage_offset())) for p, std, t in held]
    done = 0
    for run in abutting([tensor for *_, tensor in held], labels):
        place, std, _ = held[done]
        done += len(run)
        own = found.setdefault(place.group, Coordinates(place.group, place.total, []))
        own.stretches.append(Stretch(as_flat(run).detach(), std, place.first))
    return list(found.values())


def _unaddressable(device: torch.device, dtype: torch.dtype) -> InvalidArgumentError:
    return InvalidArgumentError(
        "noise",
        expected="float32 sums and the Triton noise kernel, or sums on a CPU, for several ranks",
        got=f"{dtype} on {device}",
        remedy="torch's generator cannot draw the noise of a part alone: install Triton, keep the "
        "weights in float32, or run one process",
    )


def _by_piece(stretches: Sequence[Stretch], size: int) -> dict[int, list[Stretch]]:
    """The stretches cut where coordinates are multiples of `size`, by the number of the piece."""
    pieces: dict[int, list[Stretch]] = {}
    for flat, std, first in stretches:
        done = 0
        while done < flat.numel():
            piece, inside = divmod(first + done, size)
            part = flat[done : done + size - inside]
            pieces.setdefault(piece, []).append(Stretch(part, std, first + done))
            done += part.numel()
    return pieces


def _packed(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """The vectors in order, cut where they are large, in lists of at most `size` elements."""
    packed: list[torch.Tensor] = []
    room = size
    for piece in itertools.chain.from_iterable(tensor.split(size) for tensor in tensors):
        if piece.numel() > room:
            yield packed
            packed, room = [], size
        packed.append(piece)
        room -= piece.numel()
    if packed:
        yield packed
