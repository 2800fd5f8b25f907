"""Rehearses what follows a backward: noise and shuffle, so that their kernels are ready by then."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from functools import partial

import torch

from shuffled_dpsgd.permutation import PermutationSpec, apply_to_tensors, draw, identity
from shuffled_dpsgd.permutation.move import kernel_route
from shuffled_dpsgd.runtime.rehearsals import REHEARSALS, are_whole, may_rehearse
from shuffled_dpsgd.runtime.triton_support import triton_available
from shuffled_dpsgd.training import noise_route

# Sums of so many numbers from such a place on: kernels are compiled apart for multiples of 16.
_STRETCHES = ((8192, 0), (8191, 0), (8192, 1))
# One for all runs: a spec may be used by several.
_TOPIC = "noise and shuffle"
# What this process has rehearsed: another run finds its kernels there.
_begun: set[Hashable] = set()


def rehearse_release(
    spec: PermutationSpec | None,
    parameters: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Begin to rehearse noise and, with a `spec`, the shuffle of tensors like the `parameters`.

    Not urgent: a forward and a backward come first. The shuffle must not be drawn
    before `wait_for_rehearsals`: both use the same buffers.
    """
    shapes = () if spec is None else tuple(spec.shapes.items())
    if not may_rehearse(device) or not triton_available() or (device, shapes) in _begun:
        return
    _begun.add((device, shapes))
    noise_route.ROUTE.try_ahead(device, is_urgent=False)
    for size, first in _STRETCHES:
        REHEARSALS.add(_TOPIC, partial(_add_noise, size, first, device), device, is_urgent=False)
    if spec is not None and spec.groups and are_whole(parameters.values()):
        kernel_route.ROUTE.try_ahead(device, is_urgent=False)
        REHEARSALS.add(
            _TOPIC,
            partial(_shuffle, spec, parameters, device),
            device,
            announcement=partial(_announce_shuffle, spec, parameters, device),
            is_urgent=False,
        )


def wait_for_rehearsals() -> None:
    """Return once noise and shuffle may be drawn."""
    REHEARSALS.wait_for(_TOPIC)


def _add_noise(size: int, first: int, device: torch.device) -> None:
    from shuffled_dpsgd.training.triton_noise import add_normal_

    zeros = torch.zeros(size, device=device, dtype=torch.float32)
    add_normal_(zeros, key=(0, 0, 0, 0), first=first, std=1.0, divide_by=2.0)


def _shuffle(
    spec: PermutationSpec, parameters: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Draw, and move one tensor of every shape, each a copy without contents."""
    drawn = draw(spec, torch.Generator(device).manual_seed(0))
    apply_to_tensors(drawn, _empty_copies(spec, parameters))


def _announce_shuffle(
    spec: PermutationSpec, parameters: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """The same launches, without what others share, and without indices that nobody has written."""
    alone = copy.copy(spec)
    draw(alone, torch.Generator(device).manual_seed(0))
    apply_to_tensors(identity(alone, device), _empty_copies(spec, parameters))


def _empty_copies(
    spec: PermutationSpec, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    by_shape = {spec.shapes[name]: name for name in spec.axes_of}
    return {name: torch.empty_like(parameters[name]) for name in by_shape.values()}
