"""The samples' norms on the host, while a GPU is still adding up their gradients.

Settling finds all norms first and adds the weighted gradients to the sums afterwards. Whoever waits
for the norms need not wait for the sums. So settling announces its norms by an event that lies
between the two, and a stream of its own copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Announcement(NamedTuple):
    """Norms of a batch that can be read once the event has passed, until the next is settled."""

    norms_B: Tensor
    event: torch.cuda.Event


def announce(norms_B: Tensor) -> Announcement | None:
    """Say that the norms are known to whatever the current stream is asked for from now on.

    While the stream is recorded, the event becomes a part of the recording and passes again in
    every replay. None on other devices, and where a recording cannot hold an event.
    """
    if norms_B.device.type != "cuda":
        return None
    is_recorded = torch.cuda.is_current_stream_capturing()
    if is_recorded and torch.version.hip is not None:
        return None
    event = torch.cuda.Event(external=True) if is_recorded else torch.cuda.Event()
    event.record()
    return Announcement(norms_B, event)


class EarlyNorms:
    """All norms since the last reset, and when the latest of them are known."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self._latest: Announcement | None = None
        self._settled_on: torch.cuda.Stream | None = None
        self._reading: torch.cuda.Stream | None = None

    def add(self, norms_B: Tensor, announced: Announcement | None = None) -> None:
        """Add those of a batch, with what was announced of them."""
        self.batches.append(norms_B)
        self._latest = announced
        self._settled_on = None
        if announced is not None:
            self._settled_on = torch.cuda.current_stream(norms_B.device)

    def clear(self) -> None:
        """Forget everything."""
        self.batches, self._latest = [], None

    def read(self, others: Sequence[Tensor]) -> list[Tensor]:
        """On the host: the norms of all samples, then the others.

        The others must have been asked for, of the current stream, before the latest batch was
        settled. Without an announcement this waits for everything that stream was asked for.
        """
        latest = self._latest
        if latest is None or torch.cuda.current_stream(latest.norms_B.device) != self._settled_on:
            norms_N = torch.cat(self.batches) if self.batches else torch.zeros(0)
            return [norms_N.cpu(), *(other.cpu() for other in others)]
        if self._reading is None:
            self._reading = torch.cuda.Stream(latest.norms_B.device)
        self._reading.wait_event(latest.event)
        counted = len(self.batches[-1])
        with torch.cuda.stream(self._reading):
            norms_N = torch.cat([*self.batches[:-1], latest.norms_B[:counted]])
            found = [tensor.to("cpu", non_blocking=True) for tensor in (norms_N, *others)]
        # All tensors are held until here, so none of their memory was given to anybody else.
        self._reading.synchronize()
        return found
