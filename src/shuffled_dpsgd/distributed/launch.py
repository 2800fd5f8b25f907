"""Joining the processes that torchrun, SLURM or a shell has started.

The environment says who a process is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as
`torchrun` sets them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shuffled_dpsgd.distributed.world import (
    World,
    current_world,
    declared_size,
    leave_world,
    timeout_s,
)
from shuffled_dpsgd.errors import InvalidArgumentError, RankError


@contextmanager
def launched(device: str = "auto") -> Iterator[World]:
    """The ranks of this launch, joined for as long as the context lasts.

    With one process, or where somebody has joined already, nothing is started and nothing ended.
    Ranks on GPUs talk NCCL and use the device of their LOCAL_RANK; with `device="cpu"`, and where
    there is no GPU, they talk gloo. A rank that waits longer than `SHUFFLED_DPSGD_TIMEOUT_S`
    seconds for the others ends with an error.

    Raises:
        RankError: the others cannot be reached.
    """
    if declared_size() == 1 or (dist.is_available() and dist.is_initialized()):
        yield current_world()
        return
    if not dist.is_available():
        raise InvalidArgumentError(
            "WORLD_SIZE", expected="1, as this torch has no torch.distributed", got=declared_size()
        )
    if device.startswith("cuda:"):
        raise InvalidArgumentError(
            "device", expected="auto, cuda or cpu: each rank has a GPU of its own", got=device
        )
    on_gpu = device.startswith(("auto", "cuda")) and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(_local_device())
    _join(on_gpu=on_gpu)
    world = current_world()
    try:
        yield world
    except Exception as error:
        with _undisturbed(), world.last_words(error):
            leave_world()
        raise
    leave_world()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, SIGTERM ends nothing: this process is ending, and has yet to say why.

    A launcher that sees one rank die sends it to all others at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Handlers of signals can only be set in the main thread.
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        # None stands for a handler that was not set by Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _join(*, on_gpu: bool) -> None:
    """Meet the other ranks at the address in the environment.

    torchrun may keep its store when it starts the ranks again, and in it the addresses of those
    that are gone: every attempt has its own part of the store.
    """
    timeout = timedelta(seconds=timeout_s())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"shuffled_dpsgd/{attempt}", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the {declared_size()} ranks of this launch cannot meet: {error}; set MASTER_ADDR and "
            "MASTER_PORT to an address of rank 0's machine that all others reach, and start every "
            "rank"
        ) from error


def _local_device() -> int:
    text = os.environ.get("LOCAL_RANK", "0")
    number, count = int(text), torch.cuda.device_count()
    if number >= count:
        raise InvalidArgumentError(
            "LOCAL_RANK",
            expected=f"one of {count} CUDA devices, a rank each",
            got=number,
            remedy=f"start at most {count} processes on this machine, or train with device cpu",
        )
    return number
