"""What the kernels have to know about releases of Gluon, found by asking and not by version.

The old names may still be there, only to say that they are gone; so the new ones are asked for.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# All threads of a group of warps wait for each other. `thread_barrier` in Triton 3.6.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# The copy engine begins to fill a buffer. `async_copy_global_to_shared` in Triton 3.6 and 3.7.
begin_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def fix_keys(*functions: Any) -> None:
    """Have functions hashed now, in an order in which none comes before what it calls.

    Triton keeps compiled kernels on disk under a hash. A function is hashed when it is first
    needed, and the constants that its callees use are part of its hash only if these were hashed
    earlier. So without this a kernel's hash, and whether it is found on disk, would depend on which
    kernel a process happens to need first.
    """
    for function in functions:
        _ = function.cache_key
