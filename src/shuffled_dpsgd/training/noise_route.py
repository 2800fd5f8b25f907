"""Whether faster noise serves on a device, found by comparing it with its definition."""

from __future__ import annotations

import numpy as np
import torch

from shuffled_dpsgd.runtime.c_library import is_wanted
from shuffled_dpsgd.runtime.routes import Route, expect, expect_close
from shuffled_dpsgd.runtime.triton_support import triton_available
from shuffled_dpsgd.training import box_muller, native_noise
from shuffled_dpsgd.training.philox_reference import BLOCK, Key, expected_normals

# Not a run's key, and never used for noise. Two words have their highest bit set.
_TRIAL_KEY: Key = (0x243F6A88, 0x85A308D3, 0xFFFFFFFF, 0x7FFFFFFF)
_SIZE, _FIRST = 9000, 700
# So many that a few radii need their second draw.
_C_SIZE = (1 << 18) - 1


# Numbers near 10 and angles near pi round by so much.
_ROUNDING = 4e-6
_CPU = torch.device("cpu")


def may_take_c() -> bool:
    """Whether noise on the CPU may come from compiled C."""
    return is_wanted() and C_ROUTE.serves(_CPU)


def try_c(_: torch.device) -> None:
    """An odd number of sums with noise against numpy's, between some that must not be touched."""
    sums = []
    for way in (native_noise, box_muller):
        guarded = np.full(_C_SIZE + 64, 9.0, dtype=np.float32)
        part = box_muller.NoisedPart(guarded[32:-32], 0, 2.0)
        way.add_normals(np.random.Generator(np.random.SFC64(_FIRST)), _C_SIZE, [part], 4.0)
        sums.append(guarded)
    found, expected = sums
    is_guarded = bool((found[:32] == 9.0).all() and (found[-32:] == 9.0).all())
    expect(is_guarded, "noise outside the sums")
    error = float(np.abs(found - expected).max())
    expect(error <= _ROUNDING, f"noise off by {error:.3g}, more than {_ROUNDING:.3g}")


def may_take_kernel(device: torch.device) -> bool:
    """Whether the kernel serves on `device`."""
    return device.type == "cuda" and triton_available() and ROUTE.serves(device)


def try_kernel(device: torch.device) -> None:
    """Some thousand numbers against numpy in float64, in the middle of a guarded buffer."""
    from shuffled_dpsgd.training.triton_noise import add_normal_

    guarded = torch.full((_SIZE + 64,), 9.0, device=device, dtype=torch.float32)
    add_normal_(guarded[32:-32], key=_TRIAL_KEY, first=_FIRST, std=0.5, divide_by=4.0)
    blocks = -(-(_FIRST + _SIZE) // BLOCK)
    normals = torch.from_numpy(expected_normals(_TRIAL_KEY, range(blocks))[0])
    expected = (9.0 + 0.5 * normals[_FIRST : _FIRST + _SIZE]) / 4.0
    expect_close(guarded[32:-32], expected, rtol=1e-5, what="noise")
    is_guarded = bool((guarded[:32] == 9.0).all() & (guarded[-32:] == 9.0).all())
    expect(is_guarded, "noise outside the sums")


ROUTE = Route(
    name="Noise in Triton",
    package="shuffled_dpsgd.training.triton_noise",
    instead="torch's generator serves",
    cost="noise is drawn, added and divided in passes of their own, and stops at 6.7 standard "
    "deviations",
    trial=try_kernel,
)

C_ROUTE = Route(
    name="Noise in C",
    package="shuffled_dpsgd.training",
    instead="numpy serves",
    cost="noise for a large model took 2.8 times as long on two cores",
    trial=try_c,
    is_remembered=False,
)
