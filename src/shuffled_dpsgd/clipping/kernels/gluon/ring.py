"""What the kernels written in Gluon for Hopper share: a ring of buffers.

One warp fills the buffers of a ring in turn while groups of four warps multiply what lies in them.
Every buffer has two barriers: `ready` when it is filled, `empty` when all groups are done with it.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from shuffled_dpsgd.clipping.kernels.gluon.compatibility import fix_keys

ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place in the ring of buffers after this one, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The barriers `ready` and `empty` of a ring."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return ready, empty


@gluon.jit
def source_of(ring, tensor, B, T, W, batch, row):  # type: ignore[no-untyped-def]
    """A (B, T, W) tensor of these strides, to be loaded in boxes of one buffer of the ring."""
    box: gl.constexpr = [1, ring.shape[2], ring.shape[3]]
    return tma.make_tensor_descriptor(tensor, [B, T, W], [batch, row, 1], box, ring.type.layout)


@gluon.constexpr_function
def held(N):  # type: ignore[no-untyped-def]
    """How a group of warps holds 64 rows of N products."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


fix_keys(after, barriers, source_of)


def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Device memory for a launch's copy-engine descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
