"""Finds a physical batch that fits into memory, by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import MapStyle, PartLoader, shaped, to_device
from shuffled_dpsgd.training.layout import Part, lengths_of
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

    Sets and returns `private.physical_batch_size`. Nothing is released, and torch's global
    generators are restored. The longest records are tried if their lengths are known, else the
    first ones.
    """
    if private.is_sharded:
        raise InvalidArgumentError(
            "physical_batch",
            expected="'as-planned' for a sharded model",
            got="a search for one that fits",
            remedy="ranks that run out of memory at different moments would wait for each other: "
            "set physical_batch_size, the same on all ranks",
        )
    if private.plan.records_per_unit:
        raise InvalidArgumentError(
            "physical_batch",
            expected="'as-planned' where units are drawn",
            got="a search for one that fits",
            remedy="set physical_batch_size, in records",
        )
    size = min(start or private.plan.expected_batch_size, len(data))
    lengths = lengths_of(data)
    longest = None if lengths is None else max(lengths)
    order = range(len(data))
    records = order if lengths is None else sorted(order, key=lambda i: -lengths[i])[:size]
    load = PartLoader(data, collate or default_collate)
    devices = [private.device] if private.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        while True:
            part = Part(records=tuple(records[:size]), counted=size, length=longest)
            if _fits(private, load[part], per_sample_loss):
                break
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


def _fits(private: PrivateTraining, loaded: Any, per_sample_loss: PerSampleLoss) -> bool:
    batch, fits = to_device(shaped(loaded), private.device), True
    with private:
        try:
            private.backward(per_sample_loss(private.model, batch))
        except torch.OutOfMemoryError:
            fits = False
        finally:
            private.discard()
    if not fits and private.device.type == "cuda":
        torch.cuda.empty_cache()
    return fits
