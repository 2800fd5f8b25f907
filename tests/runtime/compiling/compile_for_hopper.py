"""A process without a GPU that compiles kernels for one, by workers: run by `test_for_hopper`.

Prints, as JSON, where the kernels came from and which this process compiled itself. With `--stay`
it prints the process that the workers are forks of, after a first kernel, and waits to be killed.
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from shuffled_dpsgd.clipping.kernels.gluon import squares
from shuffled_dpsgd.clipping.kernels.triton import casts
from shuffled_dpsgd.runtime.compiling import triton_hook
from shuffled_dpsgd.runtime.compiling.workers import Workers
from shuffled_dpsgd.training import triton_noise


def launches() -> None:
    """A plain kernel, one with constants of its own, and one in Gluon; one of them twice."""
    for _ in range(2):
        casts.copy_all([torch.empty(5000, dtype=torch.bfloat16)], [torch.empty(5000)])
    triton_noise.add_normal_(
        torch.empty(9000), key=(1, 2, 3, 1 << 31), first=0, std=1.0, divide_by=2.0
    )
    x, g = (torch.empty(2, 128, width, dtype=torch.bfloat16) for width in (64, 128))
    squares.tile_sq_norms([x], [g], True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stay", action="store_true")
    options = parser.parse_args()
    target = GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    driver.set_active(fake)
    run = JITFunction.run
    JITFunction.run = lambda *args, **given: run(*args, **{**given, "warmup": True})
    here: list[str] = []
    for kind in (ASTSource, GluonASTSource):
        make_ir = kind.make_ir

        def watched(source: Any, *args: Any, make_ir: Any = make_ir, **given: Any) -> Any:
            here.append(source.name)
            return make_ir(source, *args, **given)

        kind.make_ir = watched
    workers = Workers(2)
    hook = triton_hook.install(workers, lambda: None)
    assert hook is not None
    if options.stay:
        casts.copy_all([torch.empty(5000, dtype=torch.bfloat16)], [torch.empty(5000)])
        print(workers.process.pid, flush=True)
        time.sleep(60)
    launches()
    print(json.dumps({"tally": hook.tally, "here": here}))


if __name__ == "__main__":
    main()
