"""Launches that are the same at every step, recorded once as a CUDA graph and replayed.

A launch from Python costs the host some fifty microseconds in the middle of training, a replay of
all of them together about as much as one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

# SHUFFLED_DPSGD_CUDA_GRAPHS=0: every launch is issued anew.
REPLAY = os.environ.get("SHUFFLED_DPSGD_CUDA_GRAPHS", "1") != "0"


class Recording:
    """Launches on one device that allocate nothing and whose arguments never change.

    What differs from run to run lies in buffers the kernels read, written on the same stream
    before. `launch` must keep alive whatever its kernels reach.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        self._launch = launch
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def run(self) -> None:
        """Do what `launch` does, on the current stream.

        The first run issues the launches, since kernels must be compiled and loaded before they
        can be recorded; so does a run inside somebody else's capture, which records them there.
        """
        if self._device.type != "cuda":
            self._launch()  # Triton's interpreter
            return
        with torch.cuda.device(self._device):
            if not REPLAY or not self._warm or torch.cuda.is_current_stream_capturing():
                self._launch()
                self._warm = True
                return
            if self._graph is None:
                self._graph = self._record()
            self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Unlike `torch.cuda.graph`, this neither waits for the device nor empties its caches:
        # nothing is allocated, and other threads may go on with what they do.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch()
            finally:
                graph.capture_end()
        return graph
