"""Every GPU kernel of this package, as calls of the functions that launch it.

`benchmarks.kernel_launches` makes these calls with tensors on a CPU and compiles what would be
launched.
Triton compiles a kernel again for other types, for sizes that are no multiples of 16, and for
other values of its constants. What is listed covers layers whose widths are multiples of 16, in
bfloat16, with samples of the given lengths, and a few odd sizes.

Shapes: B samples, T tokens, D input features, P output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.permutation import draw, gpu

# Of a usual text, and of an image of 14 by 14 patches.
LENGTHS = (128, 197)
Map = tuple[int, int, int]
"""Tokens, inputs and outputs of a linear layer."""
B = 2


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """A call that launches kernels, and from which to which chip they serve, as in sm_90."""

    name: str
    run: Callable[[], object]
    first_chip: int = 0
    last_chip: int = 999

    def serves(self, chip: int) -> bool:
        return self.first_chip <= chip <= self.last_chip


hopper_launch = partial(KernelLaunch, first_chip=90, last_chip=99)


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Makes tensors without contents on a device."""

    device: torch.device

    def halves(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def floats(self, *shape: int) -> Tensor:
        return self.halves(*shape, dtype=torch.float32)

    def pair(self, one: Map) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and output gradients of one layer."""
        T, D, P = one
        return [self.halves(B, T, D)], [self.halves(B, T, P)]


def all_launches(device: torch.device, lengths: Sequence[int] = LENGTHS) -> list[KernelLaunch]:
    """All of them; tensors are made when a launch is run."""
    made = Tensors(device=device)
    maps = [(T, 768, 3072) for T in lengths] + [(T, 72, 136) for T in (37, 192, 300)]
    return [
        *linear_launches(made, maps),
        *float32_launches(made, maps),
        *gluon_launches(made, maps),
        *norm_layer_launches(made),
        *release_launches(made),
    ]


def linear_launches(made: Tensors, maps: Sequence[Map]) -> Iterator[KernelLaunch]:
    """Norms and sums of linear layers in plain Triton."""
    linear, tiles, sums = _modules("linear", "tiles", "sums")

    def norms(way: Callable[..., object], one: Map, bias: bool) -> None:
        way(*made.pair(one), bias)

    def add(one: Map) -> None:
        _, D, P = one
        sums.weighted_outer_sums(*made.pair(one), made.floats(B), [made.floats(P, D)])

    for one in maps:
        for way, bias in product((linear.gram_sq_norms, tiles.tile_sq_norms), (True, False)):
            yield KernelLaunch(name=_name(one), run=partial(norms, way, one, bias))
        yield KernelLaunch(name=_name(one), run=partial(add, one))


def float32_launches(made: Tensors, maps: Sequence[Map]) -> Iterator[KernelLaunch]:
    """Linear layers of float32 on tensor cores."""
    linear, tiles, sums = _modules("linear", "tiles", "sums")

    def layer(way: Callable[..., object], T: int, D: int, P: int) -> None:
        way([made.floats(B, T, D)], [made.floats(B, T, P)], True)

    def add(T: int, D: int, P: int) -> None:
        x, g = [made.floats(B, T, D)], [made.floats(B, T, P)]
        sums.weighted_outer_sums(x, g, made.floats(B), [made.floats(P, D)])

    for one in maps:
        for way in (linear.gram_sq_norms, tiles.tile_sq_norms):
            yield KernelLaunch(name=f"float32, {_name(one)}", run=partial(layer, way, *one))
        yield KernelLaunch(name=f"float32, {_name(one)}", run=partial(add, *one))


def gluon_launches(made: Tensors, maps: Sequence[Map]) -> Iterator[KernelLaunch]:
    """Sums of linear layers on Hopper; weights may be stored transposed, as GPT-2's."""
    (weighted,) = _modules("weighted_sums", folder="gluon")

    def add(one: Map, bias: bool, transposed: bool) -> None:
        _, D, P = one
        out = made.floats(D, P).mT if transposed else made.floats(P, D)
        biases = [made.floats(P)] if bias else []
        weighted.weighted_outer_sums(*made.pair(one), made.floats(B), [out], True, biases)

    for one in maps:
        for bias, transposed in product((True, False), repeat=2):
            yield hopper_launch(
                name=f"Gluon, {_name(one)}", run=partial(add, one, bias, transposed)
            )


def norm_layer_launches(made: Tensors) -> Iterator[KernelLaunch]:
    """Layer norms and RMS norms."""
    (norms,) = _modules("norms")

    def norm_layer(dtype: torch.dtype, D: int) -> None:
        g = made.halves(B, 128, D, dtype=dtype)
        norms.norm_sums([made.floats(B, 128, D)], [g], 1e-5)

    for dtype in (torch.bfloat16, torch.float32):
        for D in (768, 384, 4096):
            name = f"norm layer of {D}, {dtype}"
            yield KernelLaunch(name=name, run=partial(norm_layer, dtype, D))


def release_launches(made: Tensors) -> Iterator[KernelLaunch]:
    """Noise at any place of a release, and the shuffle."""
    noise = import_module("shuffled_dpsgd.training.triton_noise")

    def add_noise(size: int, first: int) -> None:
        sums, place = made.floats(size), Place(0, first)
        noise.add_normal_(sums, key=bytes(32), place=place, std=1.0, divide_by=2.0)

    for size, first in ((8192, 0), (8191, 0), (8192, 1)):
        yield KernelLaunch(name="noise", run=partial(add_noise, size, first))
    for rows, cols, dtype in (
        (768, 3072, torch.float32),
        (768, 3072, torch.bfloat16),
        (40, 24, torch.float64),
    ):
        name = f"shuffle of {rows} by {cols}, {dtype}"
        yield KernelLaunch(name=name, run=partial(_shuffle, made, rows, cols, dtype))


def _shuffle(made: Tensors, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Move two matrices along both axes."""
    spec = gpu.small_spec(rows, cols)
    permutation = draw(spec, torch.Generator(made.device))
    pairs = [(name, made.halves(*shape, dtype=dtype)) for name, shape in spec.shapes.items()]
    gpu.move(permutation, pairs)


def _name(one: Map) -> str:
    return f"T={one[0]}, {one[1]} to {one[2]}"


def _modules(*names: str, folder: str = "triton") -> list[ModuleType]:
    return [choices.module(f"{folder}.{name}") for name in names]
