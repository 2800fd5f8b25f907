"""Finding a physical batch that fits, by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import MapStyle, shaped, to_device
from shuffled_dpsgd.training.private import PrivateTraining

PerSampleLoss = Callable[[torch.nn.Module, Any], torch.Tensor]


def find_physical_batch_size(
    private: PrivateTraining,
    data: MapStyle,
    per_sample_loss: PerSampleLoss,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    start: int | None = None,
) -> int:
    """Try a forward and backward at `start` (the expected batch), halving on out-of-memory.

    Sets and returns `private.physical_batch_size`. Nothing is released and no randomness of the
    run is used: the probes' sums are dropped and torch's global generators put back. Records
    are the first ones of `data`, so put long sequences first if their lengths differ much.
    """
    size = min(start or private.plan.expected_batch_size, len(data))
    devices = [private.device] if private.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        while not _fits(private, data, per_sample_loss, collate or default_collate, size):
            if size == 1:
                raise InvalidArgumentError(
                    "physical_batch_size",
                    expected="a batch that fits in memory",
                    got="out of memory with one record",
                    remedy="use gradient checkpointing, bf16, shorter records or LoRA",
                )
            size //= 2
    private.physical_batch_size = size
    return size


def _fits(
    private: PrivateTraining,
    data: MapStyle,
    per_sample_loss: PerSampleLoss,
    collate: Callable[[list[Any]], Any],
    size: int,
) -> bool:
    batch = to_device(shaped(collate([data[i] for i in range(size)])), private.device)
    with private:
        try:
            private.backward(per_sample_loss(private.model, batch))
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = True
        finally:
            private.discard()
    if not fits and private.device.type == "cuda":
        torch.cuda.empty_cache()
    return fits
