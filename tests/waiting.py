"""Code that must not make the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whatever waits for the device inside is an error; torch's mode is as before afterwards."""
    with warnings.catch_warnings():
        # torch says of this mode that it is a prototype.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
