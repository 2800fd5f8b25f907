"""Compiles the kernels that trials launch, before it is known whether there will be a run.

A trial launches the same kernels whatever the model. Those in Gluon take longest to compile, about
two seconds each, and a run that begins waits for them. So a process that has been started early
compiles them while its user loads data. It has no GPU, no torch and no tensors: what decides about
a variant are types and sizes. A wrong guess costs some time of another core.

A module of kernels that takes part has a function `compile_trial`. It launches what the module's
trial launches, on pointers that are made by the function it is given, from names of types.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

FUNCTION = "compile_trial"
# The chips that kernels in Gluon serve.
_HOPPER = 9
_NVML = "libnvidia-ml.so.1"


class Pointer:
    """Stands for a tensor whose memory begins at a multiple of 16 bytes."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def trials_here(modules: Iterable[ModuleType]) -> list[Callable[[], None]]:
    """What compiles the trials of these modules for this machine, each for a process of its own.

    Nothing if it has no GPU that they serve.
    """
    found = [module for module in modules if hasattr(module, FUNCTION)]
    chip = next((chip for chip in chips() if chip // 10 == _HOPPER), None) if found else None
    return [] if chip is None else [partial(compile_trial, module, chip) for module in found]


def compile_trial(module: ModuleType, chip: int) -> None:
    """Compile a module's trial into Triton's cache, for a chip such as 90.

    For a process that does nothing else: its Triton compiles and never launches.
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
    getattr(module, FUNCTION)(Pointer)


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
