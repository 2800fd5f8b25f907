"""What releases of Gluon call by different names, found by asking for them and not by version.

The old names may still be there, only to say that they are gone; so the new ones are asked for.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# All threads of a group of warps wait for each other. `thread_barrier` in Triton 3.6.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# The copy engine begins to fill a buffer. `async_copy_global_to_shared` in Triton 3.6 and 3.7.
begin_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
