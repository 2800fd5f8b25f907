"""Compiles every GPU kernel as its launches would, without a GPU and without launching.

    PYTHONPATH=<folder of one Triton> python -m benchmarks.kernel_launches --chips 80 90

Run by `benchmarks.compile_kernels`, once for each release of Triton. The launches that
`benchmarks.launches` lists are made with tensors on the CPU, and what Triton
would launch is compiled for a chip instead. So arguments, alignment and options are those of real
launches. Each compilation is a line of JSON on the standard output.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.launches import all_launches

DEVICE_LIMITS = "shuffled_dpsgd.clipping.kernels.triton.device_limits"
# Shared memory that one program may have, in bytes (CUDA C++ programming guide).
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


class Compiler:
    """Stands in for the GPU: what is launched is compiled for `chip` and noted."""

    def __init__(self) -> None:
        self.chip = 0
        self.compiled: list[dict[str, Any]] = []
        driver.set_active(
            SimpleNamespace(
                get_current_device=lambda: self.chip,
                get_current_stream=lambda device: 0,
                get_current_target=lambda: GPUTarget("cuda", self.chip, 32),
            )
        )
        limits = importlib.import_module(DEVICE_LIMITS)
        limits.shared_bytes = lambda device: SHARED_BYTES[self.chip]
        self._run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **given: self._compile(kernel, *args, **given)

    def _compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        note = {"kernel": name_of(kernel), "chip": self.chip, "error": None}
        begin = time.perf_counter()
        try:
            found = self._run(kernel, *args, grid=grid, warmup=True, **options)
            shared = int(found.metadata.shared)
            if shared > SHARED_BYTES[self.chip]:
                note["error"] = f"{shared >> 10} KiB of shared memory"
        except Exception as error:
            note["error"] = reason_of(error)
        self.compiled.append(note | {"seconds": round(time.perf_counter() - begin, 2)})


def reason_of(error: BaseException) -> str:
    """The innermost of an error and its causes, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[-300:]


def name_of(kernel: Any) -> str:
    """The module of a kernel, in short, and its name."""
    parts = kernel.fn.__module__.split(".")
    return ".".join([*parts[-2:], kernel.fn.__name__])


def entry_kernels() -> set[str]:
    """Every kernel that is launched, and not called by another, in the modules imported so far."""
    modules = [m for name, m in sys.modules.items() if name.startswith("shuffled_dpsgd")]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    source = {kernel: inspect.getsource(kernel.fn) for kernel in found}
    called = {
        kernel
        for kernel in found
        if any(
            f"{kernel.fn.__name__}(" in text or f"({kernel.fn.__name__}," in text
            for other, text in source.items()
            if other is not kernel
        )
    }
    return {name_of(kernel) for kernel in found - called}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", type=int, nargs="+", default=[*SHARED_BYTES])
    chips = parser.parse_args().chips
    compiler = Compiler()
    print(json.dumps({"triton": triton.__version__, "torch": torch.__version__}), flush=True)
    launches = all_launches(torch.device("cpu"))
    seen = set()
    for chip in chips:
        compiler.chip = chip
        for launch in launches:
            if not launch.serves(chip):
                continue
            compiler.compiled.clear()
            launch.run()
            for note in compiler.compiled:
                seen.add(note["kernel"])
                print(json.dumps({"launch": launch.name, **note}), flush=True)
    for kernel in sorted(entry_kernels() - seen) if {*chips} >= {*SHARED_BYTES} else []:
        note = {"kernel": kernel, "chip": chips[0], "error": "no launch compiles it", "seconds": 0}
        print(json.dumps({"launch": "", **note}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
