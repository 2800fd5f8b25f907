"""Launches that are the same at every step, recorded once as a CUDA graph and replayed.

A launch from Python costs the host some fifty microseconds in the middle of training. A replay of
all launches together costs about as much as one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shuffled_dpsgd.runtime import cuda_graphs

REPLAY = cuda_graphs.may_record()


class Recording:
    """Launches on one device that allocate nothing and whose arguments never change.

    What differs from run to run lies in buffers the kernels read, written on the same stream
    before. `launch` must keep alive whatever its kernels reach.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        self._launch = launch
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_warm = False
        self._may_record = True

    def run(self) -> None:
        """Do what `launch` does, on the current stream.

        The first run issues the launches, since kernels must be compiled and loaded before they
        can be recorded. So does a run inside somebody else's capture, which records them there,
        and every run after a recording that failed.
        """
        if self._device.type != "cuda":
            self._launch()  # Triton's interpreter
            return
        with torch.cuda.device(self._device):
            recordable = REPLAY and self._may_record and self._is_warm
            if recordable and not torch.cuda.is_current_stream_capturing():
                if self._graph is None:
                    self._record()
                if self._graph is not None:
                    self._graph.replay()
                    return
            self._launch()
            self._is_warm = True

    def _record(self) -> None:
        stream = torch.cuda.Stream(self._device)
        try:
            self._graph, _ = cuda_graphs.capture(self._launch, stream)
        except cuda_graphs.CaptureFailed as error:
            self._may_record = False
            cuda_graphs.warn_unrecorded("Shuffling", error)
