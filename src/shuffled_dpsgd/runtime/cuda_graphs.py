"""Recording work as a CUDA graph, with one rule for failure.

A recording saves time and nothing else. So a failure to record never reaches the caller: the
device's generator is repaired, one warning says so, and the work is done the ordinary way. That
matters most between an update and its shuffle, where an exception would leave weights that are
updated and not shuffled.

`SHUFFLED_DPSGD_CUDA_GRAPHS=0` turns recording off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shuffled_dpsgd.runtime.notices import say_once

SWITCH = "SHUFFLED_DPSGD_CUDA_GRAPHS"
Result = TypeVar("Result")

# Graphs whose capture failed. The allocator may still ask them whether they record.
_broken: list[torch.cuda.CUDAGraph] = []


def may_record() -> bool:
    """Whether the environment allows recording."""
    return os.environ.get(SWITCH, "1") != "0"


class CaptureFailed(Exception):  # noqa: N818
    """Work could not be recorded. The device is in order, and the work has not been done."""


def capture(
    work: Callable[[], Result], stream: torch.cuda.Stream, *, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record `work` on `stream`, without doing it, and return the graph and its result.

    Unlike `torch.cuda.graph`, this neither waits for the device nor empties the allocator's cache.
    Other threads, such as a loader that pins memory, may use the device meanwhile.

    Raises `CaptureFailed` if that fails; the device's generator is usable afterwards.
    """
    graph = torch.cuda.CUDAGraph()
    options: dict[str, Any] = {} if pool is None else {"pool": pool}
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local", **options)
            try:
                result = work()
            finally:
                graph.capture_end()
    except Exception as error:  # Nothing is lost: a mistake in `work` shows again when it is done.
        _broken.append(graph)
        _free_generator(stream.device)
        raise CaptureFailed(str(error)) from error
    return graph, result


def warn_unrecorded(what: str, error: CaptureFailed) -> None:
    """Say that `what` goes on without a recording, and why."""
    say_once(f"{what} goes on without CUDA graphs, more slowly: recording failed ({error}).")


def _free_generator(device: torch.device) -> None:
    """Give the device's generator a fresh state object, with the same state.

    After a failed capture it would wait for the end of that capture for ever, and the next dropout
    would fail.
    """
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
