"""Work of one's own on the threads that torch computes with on a CPU.

After a parallel operation, OpenMP's threads look for the next one for some milliseconds before they
sleep, and each keeps its core busy meanwhile. Other threads would have to share those cores. So
work is handed to OpenMP's own threads where torch uses GNU's library, whose entry every program
compiled with it calls. Elsewhere, and where there is not enough work for all of them, a pool of
threads does it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

_is_forked = False
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def on_all_threads(work: Callable[[], None], *, most: int) -> None:
    """Call `work` on several threads at once, this one among them, and wait for all.

    As many threads as torch computes with, but at most `most`, the pieces that there are. What
    `work` raises on any of them is raised here.
    """
    count = torch.get_num_threads()
    if min(count, most) <= 1:
        work()
        return
    errors: list[BaseException] = []

    def run(_: object = None) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    # All threads of torch's own operations or none: with another number, some would be ended.
    is_enough = most >= count and not _is_forked
    region = _gnu_parallel_region() if is_enough else None
    if region is not None:
        region(_Region(run), None, count, 0)
    else:
        # This thread works too: waking one more would take longer.
        others = [_pool(count - 1).submit(run) for _ in range(min(count, most) - 1)]
        run()
        wait(others)
    if errors:
        raise errors[0]


@functools.cache
def _gnu_parallel_region() -> Any | None:
    """`GOMP_parallel` of the library that this process has loaded; None if that is another one."""
    region = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None
    if region is not None:
        region.restype = None
        region.argtypes = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return region


@functools.lru_cache(maxsize=1)
def _pool(count: int) -> ThreadPoolExecutor:
    """Kept from step to step: starting threads takes as long as noise for a small model."""
    return ThreadPoolExecutor(count, thread_name_prefix="work")


def _after_fork() -> None:
    """A forked child inherits both kinds of threads by name only, and would wait for ever."""
    global _is_forked
    _is_forked = True
    _pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
