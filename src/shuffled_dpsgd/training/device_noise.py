"""Noise on the device of the sums: by a Triton kernel on a GPU, else by the core's definition.

Both compute the same numbers from the same key, up to rounding, and the referee recomputes some.
The kernel is compared with the definition once in a process. If it fails, noise is drawn on the CPU
and copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shuffled_dpsgd.core.noise import GaussianNoise, Place, check_sums, normals, number
from shuffled_dpsgd.runtime.backends import TAKEN, Backend, expect, expect_close, triton_available

# Not a run's key, and never used for noise. Half of its bytes have their highest bit set.
_TRIAL_KEY = bytes(range(112, 144))
_TRIAL_PLACE, _TRIAL_SIZE = Place(1, 4080), 9008


class DeviceNoise(GaussianNoise):
    """Adds the noise that the core defines, on the device of each sum."""

    def add_(
        self,
        tensors: Mapping[str, torch.Tensor],
        stds: Mapping[str, float],
        *,
        key: bytes,
        places: Mapping[str, Place] | None = None,
        divide_by: float = 1.0,
    ) -> None:
        """Add N(0, stds[name]²) to every coordinate of every tensor, then divide."""
        check_sums(tensors, stds)
        places = number(tensors) if places is None else places
        served = {name: tensor for name, tensor in tensors.items() if may_take_kernel(tensor)}
        if served:
            TAKEN["noise"].add("triton")
            add_by_kernel_(served, stds, key=key, places=places, divide_by=divide_by)
        others = {name: tensor for name, tensor in tensors.items() if name not in served}
        if others:
            TAKEN["noise"].add("chacha")
            own = {name: stds[name] for name in others}
            super().add_(others, own, key=key, places=places, divide_by=divide_by)


def add_by_kernel_(
    tensors: Mapping[str, torch.Tensor],
    stds: Mapping[str, float],
    *,
    key: bytes,
    places: Mapping[str, Place],
    divide_by: float,
) -> None:
    """The same by the kernel, for float32 sums: adjacent ones with one std share a launch."""
    from shuffled_dpsgd.training.triton_noise import add_normal_

    # Neighbours in memory are one stretch only if their numbers are neighbours as well.
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    sums = [tensors[name] for name in names]
    labels = [
        (places[name].group, stds[name], places[name].first - int(tensor.storage_offset()))
        for name, tensor in zip(names, sums, strict=True)
    ]
    done = 0
    for run in abutting(sums, labels):
        name = names[done]
        done += len(run)
        flat = as_flat(run).detach()
        add_normal_(flat, key=key, place=places[name], std=stds[name], divide_by=divide_by)


def abutting(
    tensors: Sequence[torch.Tensor], labels: Sequence[object] | None = None
) -> list[list[torch.Tensor]]:
    """Group tensors, in order, into runs that are contiguous in one storage.

    `as_flat` makes one vector of a run. Only views of one tensor are joined: separate allocations
    may be adjacent by chance. With `labels`, one per tensor, a run has a single label.
    """
    runs: list[list[torch.Tensor]] = []
    base: torch.Tensor | None = None
    end, dtype, label = -1, None, None
    for index, tensor in enumerate(tensors):
        owner = tensor._base
        owner = tensor if owner is None else owner
        start = int(tensor.storage_offset())
        mine = None if labels is None else labels[index]
        contiguous = tensor.is_contiguous()
        alike = tensor.dtype is dtype and mine == label
        if owner is base and start == end and alike and contiguous:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        base, end = (owner, start + tensor.numel()) if contiguous else (None, -1)
        dtype, label = tensor.dtype, mine
    return runs


def as_flat(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """A run of `abutting` as one vector that shares its memory."""
    first = run[0]
    if len(run) == 1:
        return first.view(-1)
    size = sum(tensor.numel() for tensor in run)
    return first.as_strided((size,), (1,), first.storage_offset())


def may_take_kernel(tensor: torch.Tensor) -> bool:
    """Whether the kernel serves these sums."""
    on_gpu = tensor.device.type == "cuda" and tensor.dtype == torch.float32
    return on_gpu and triton_available() and BACKEND.serves(tensor.device)


def try_kernel(device: torch.device) -> None:
    """Compare some thousand numbers with the definition, and see that nothing else is written."""
    guarded = torch.full((_TRIAL_SIZE + 64,), 9.0, device=device, dtype=torch.float32)
    add_by_kernel_(
        {"sums": guarded[32:-32]},
        {"sums": 0.5},
        key=_TRIAL_KEY,
        places={"sums": _TRIAL_PLACE},
        divide_by=4.0,
    )
    group, first = _TRIAL_PLACE
    numbers = normals(_TRIAL_KEY, group, 0, first + _TRIAL_SIZE)[first:]
    expect_close(guarded[32:-32], (9.0 + 0.5 * numbers) / 4.0, rtol=1e-5, what="noise")
    is_guarded = bool((guarded[:32] == 9.0).all() & (guarded[-32:] == 9.0).all())
    expect(is_guarded, "noise outside the sums")


BACKEND = Backend(
    name="Noise in Triton",
    instead="The CPU draws it",
    cost="every step waits for noise to be drawn there and copied",
    probe=try_kernel,
)
