"""Which kernels are compiled before it is known whether there will be a run, and how.

Kernels in Gluon take longest to compile, one to three seconds each, and a run that begins waits for
them. A trial launches the same ones whatever the model, and models of a few popular kinds share
most of the others. So processes that have been started early compile these while their user loads
data. They have no GPU, no torch and no tensors: what decides about a variant are types and sizes. A
wrong guess costs some time of another core.

A module of kernels that takes part has a function `launches_ahead`. It returns calls of the very
function that launches the module's kernels. They launch first what the module's trial launches,
then what popular layers do, on pointers that are made from names of types by the function it is
given.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

FUNCTION = "launches_ahead"
# The chips that kernels in Gluon serve.
_HOPPER = 9
_NVML = "libnvidia-ml.so.1"
Launch = Callable[[], None]


class Pointer:
    """Stands for a tensor whose memory begins at a multiple of 16 bytes."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def chip_here() -> int | None:
    """A chip of this machine that kernels are compiled for ahead, such as 90; None without one."""
    return next((chip for chip in chips() if chip // 10 == _HOPPER), None)


def launches_of(modules: Iterable[ModuleType]) -> list[Launch]:
    """What is to be compiled ahead of these modules: all trials first, then by popularity."""
    found = [getattr(module, FUNCTION)(Pointer) for module in modules if hasattr(module, FUNCTION)]
    rounds = itertools.zip_longest(*found)
    return [launch for launches in rounds for launch in launches if launch is not None]


def only_compile(chip: int) -> None:
    """Have every later launch of this process compiled for a chip, and not launched.

    For a process that does nothing else.
    """
    from shuffled_dpsgd.runtime.compiling.requests import request_of
    from shuffled_dpsgd.runtime.compiling.worker import compile_request

    def compile_only(kernel: Any, key: Any, *rest: Any) -> None:
        compile_request(request_of(kernel, *rest))

    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", chip, 32)
    importlib.import_module("triton.runtime").driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    importlib.import_module("triton.runtime.jit").JITFunction._do_compile = compile_only


def chips() -> list[int]:
    """What chips the NVIDIA GPUs of this machine are, such as 90; CUDA is not asked."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        return _chips(nvml)
    finally:
        nvml.nvmlShutdown()


def _chips(nvml: Any) -> list[int]:
    count, found = ctypes.c_uint(), []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for place in range(count.value):
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(gpu)):
            continue
        both = ctypes.byref(major), ctypes.byref(minor)
        if not nvml.nvmlDeviceGetCudaComputeCapability(gpu, *both):
            found.append(10 * major.value + minor.value)
    return found
