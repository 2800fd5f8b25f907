"""What the kernels written in Gluon for Hopper share: a ring of buffers, and strips of products.

One warp fills the buffers of a ring in turn while groups of four warps multiply what lies in them.
Every buffer has two barriers: `ready` when it is filled, `empty` when all groups are done with it.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from shuffled_dpsgd.clipping.kernels.gluon.compatibility import fix_keys

ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Starting a block takes too long for a single sample.
MIN_SAMPLES = 2


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place in the ring of buffers after this one, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def before(stage, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place in the ring of buffers before this one.

    Computed from it: a loop does not carry a variable that starts as another one's alias.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


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


@gluon.jit
def times(rows, cols, acc, step):  # type: ignore[no-untyped-def]
    """Begin to add <row, col> of all rows and columns, over the features of one load."""
    return warpgroup_mma(rows, cols.permute([1, 0]), acc, use_acc=step > 0, is_async=True)


fix_keys(after, before, barriers, source_of, times)


def even_share(blocks: int, samples: int, at_a_time: int) -> int:
    """Into how many parts the samples are divided, so that the last round of blocks is full too.

    >>> even_share(48, 128, 132), even_share(12, 128, 132), even_share(12, 8, 132)
    (8, 11, 4)
    """
    parts = range(1, max(1, samples // MIN_SAMPLES) + 1)
    return min(parts, key=lambda n: (-(-blocks * n // at_a_time) * -(-samples // n), n))
