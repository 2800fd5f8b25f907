"""The definition of the noise: (key, coordinate) → standard normal number. Nothing else draws any.

Fact established here: every coordinate of a release receives Gaussian noise of the standard
deviation asked for, independent of everything, from a stream nobody can compute without the key.

Coordinates of one dtype form a group and are numbered through, in the order of the parameters.
Coordinate j of a group belongs to a pair p by tiles of 2·LANES coordinates: with t, i = divmod(j,
2·LANES), p = t·LANES + i mod LANES, and j is the first of its pair if i < LANES, else the second.
A pair takes word p of the key's streams 0 to 3 (A, B, C, D; `group` is in the nonce) and makes two
independent normals of them by the Box-Muller transform:

    u = (A' + (B' + 1/2) / 2^31) / 2^31     A', B': the low 31 bits of A and B
    v = (C + D' / 2^31) / 2^31              C as a signed number; float32 sums take D' = 0
    first = sqrt(-2 ln u) · cos(π v),  second = sqrt(-2 ln u) · sin(π v)

u has 62 bits, so normals reach 9.3 standard deviations and are fine-grained far out: a float32 of
24 bits would end at 5.8, which a model of 1e8 coordinates would notice. float64 sums need all four
words: with fewer, their 53 bits could betray which of two sums the noise was added to.

Any part of a release can be computed alone, on any device and any number of ranks, and is the same
to rounding. That is what lets the referee recompute single coordinates, and a kernel all of them.

Floating-point noise of any kind is not the real-valued Gaussian of the theorems: an adversary who
reads every low-order bit of a released sum is outside the model (Mironov 2012). Sums are never
noised in bfloat16, whose eight bits would betray more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from shuffled_dpsgd.core.streams import words
from shuffled_dpsgd.errors import require

LANES = 4096
_TILE = 2 * LANES
# Coordinates drawn at once: large enough for torch's threads, small enough for a cache.
_PIECE = 64 * _TILE
_LOW_BITS = (1 << 31) - 1
_WIDE = (torch.float32, torch.float64)


class Place(NamedTuple):
    """The coordinates of a tensor: from number `first` of a `group` on."""

    group: int
    first: int


def number(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """The place of every tensor of a whole release.

    >>> number({"a": torch.zeros(2, 3), "b": torch.zeros(4)})["b"]
    Place(group=0, first=6)
    """
    groups: dict[torch.dtype, int] = {}
    following: dict[int, int] = {}
    places = {}
    for name, tensor in tensors.items():
        group = groups.setdefault(tensor.dtype, len(groups))
        places[name] = Place(group, following.get(group, 0))
        following[group] = places[name].first + tensor.numel()
    return places


def normal(key: bytes, place: Place, *, wide: bool = False) -> float:
    """The standard normal number of one coordinate, in double precision; `wide` for float64 sums.

    >>> round(normal(bytes(32), Place(0, 0)), 6)
    1.409681
    """
    tile, inside = divmod(place.first, _TILE)
    pair = tile * LANES + inside % LANES
    streams = range(4 if wide else 3)
    a, b, c, *d = (int(words(key, pair, 1, stream=s, group=place.group)[0]) for s in streams)
    u = ((a & _LOW_BITS) + ((b & _LOW_BITS) + 0.5) / 2**31) / 2**31
    v = (c + ((d[0] & _LOW_BITS) / 2**31 if wide else 0.0)) / 2**31
    turn = math.cos if inside < LANES else math.sin
    return math.sqrt(-2.0 * math.log(u)) * turn(math.pi * v)


def normals(
    key: bytes, group: int, first: int, count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The numbers of `count` coordinates from `first` on, which must begin a tile."""
    assert first % _TILE == 0
    tiles = -(-count // _TILE)
    # Of a last tile that is not whole, only the pairs in use.
    lanes = LANES if tiles > 1 else min(LANES, count)

    def draw(stream: int) -> torch.Tensor:
        drawn = words(key, first // 2, (tiles - 1) * LANES + lanes, stream=stream, group=group)
        return torch.from_numpy(drawn).view(tiles, lanes)

    u = draw(0).bitwise_and_(_LOW_BITS).to(dtype)
    u += draw(1).bitwise_and_(_LOW_BITS).to(dtype).add_(0.5).mul_(2.0**-31)
    radius = u.mul_(2.0**-31).log_().mul_(-2.0).sqrt_()
    angle = draw(2).to(dtype)
    if dtype == torch.float64:
        angle += draw(3).bitwise_and_(_LOW_BITS).to(dtype).mul_(2.0**-31)
    angle *= math.pi * 2.0**-31
    numbers = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return numbers.view(-1)[:count] if lanes == LANES else numbers[0, 0]


class GaussianNoise:
    """The definition, on the CPU, copied to the sums' device; what is faster is a subclass."""

    def add_(
        self,
        tensors: Mapping[str, torch.Tensor],
        stds: Mapping[str, float],
        *,
        key: bytes,
        places: Mapping[str, Place] | None = None,
        divide_by: float = 1.0,
    ) -> None:
        """Add N(0, stds[name]²) to every coordinate of every tensor, then divide.

        Without `places`, the tensors are a whole release.
        """
        check_sums(tensors, stds)
        for group, first, part in _pieces(tensors, places or number(tensors)):
            size = max(place + flat.numel() for _, place, flat in part) - first
            numbers = normals(key, group, first, size, part[0][2].dtype)
            for name, place, flat in part:
                own = numbers[place - first : place - first + flat.numel()]
                flat.add_(own.to(flat.device), alpha=stds[name]).div_(divide_by)


def sketch(
    tensors: Mapping[str, torch.Tensor], *, key: bytes, places: Mapping[str, Place] | None = None
) -> float:
    """The inner product with the noise of a key: parts of a release add up to the whole's."""
    total = 0.0
    for group, first, part in _pieces(tensors, places or number(tensors)):
        size = max(place + flat.numel() for _, place, flat in part) - first
        numbers = normals(key, group, first, size).double()
        for _, place, flat in part:
            own = numbers[place - first : place - first + flat.numel()]
            total += float(torch.dot(flat.double().cpu(), own))
    return total


def check_sums(tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float]) -> None:
    """Refuse sums that noise cannot be added to as it should be."""
    missing = sorted(set(tensors) ^ set(stds))
    require(not missing, "stds", "one standard deviation per tensor", f"mismatch at {missing}")
    for name, tensor in tensors.items():
        is_fine = tensor.dtype in _WIDE and tensor.is_contiguous()
        require(is_fine, name, "a contiguous float32 or float64 sum", tensor.dtype)


_Part = list[tuple[str, int, torch.Tensor]]


def _pieces(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place]
) -> Iterator[tuple[int, int, _Part]]:
    """(group, first coordinate, what lies there): each coordinate in exactly one piece.

    A piece begins a tile and holds `_PIECE` coordinates at most. Tiles that no tensor touches, as
    where the tensors are one rank's share, are in none.
    """
    open_parts: dict[int, tuple[int, _Part]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: places[item[0]]):
        group, at = places[name]
        flat = tensor.detach().view(-1)
        while flat.numel():
            first, part = open_parts.get(group, (-1, []))
            near = part and at < first + _PIECE and at - _end(part) < _TILE
            if not near:
                if part:
                    yield group, first, part
                first, part = at - at % _TILE, []
                open_parts[group] = first, part
            here = flat[: first + _PIECE - at]
            part.append((name, at, here))
            flat, at = flat[here.numel() :], at + here.numel()
    for group, (first, part) in open_parts.items():
        yield group, first, part


def _end(part: _Part) -> int:
    _, at, flat = part[-1]
    return at + flat.numel()
