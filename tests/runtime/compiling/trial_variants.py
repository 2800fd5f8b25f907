"""Prints the keys under which Triton keeps the kernels that a trial in Gluon launches, as JSON.

Run by `test_trial_kernels`: by a process that has torch, and runs the trial itself with tensors on
the CPU, and by one without torch (`--ahead`), as a process that compiles ahead does it. Nothing is
compiled.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

AHEAD = "--ahead" in sys.argv
KERNELS = "shuffled_dpsgd.clipping.kernels"
CHIP = 90

if AHEAD:
    from shuffled_dpsgd.runtime.compiling.torch_free import leave_torch_out

    leave_torch_out()

from shuffled_dpsgd.runtime.compiling import trial_kernels, worker  # noqa: E402
from shuffled_dpsgd.runtime.compiling.requests import (  # noqa: E402
    CompileRequest,
    key_on_disk,
    request_of,
)


def note_trials_ahead(note: Any) -> None:
    worker.compile_request = note
    names = [*worker.kernel_modules()]
    for module in map(importlib.import_module, names):
        if hasattr(module, trial_kernels.FUNCTION):
            trial_kernels.compile_trial(module, CHIP)


def note_trials(note: Any) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from shuffled_dpsgd.clipping.kernels import trials
    from shuffled_dpsgd.runtime.compiling import announcements

    target = GPUTarget("cuda", CHIP, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    JITFunction._do_compile = lambda kernel, key, *rest: note(request_of(kernel, *rest))
    trials._half = lambda device: torch.bfloat16
    announcements._here.announces = True
    trials.try_gluon_products(torch.device("cpu"))


def main() -> None:
    found: set[tuple[str, str]] = set()

    def note(request: CompileRequest) -> None:
        found.add((request.source.name, key_on_disk(request)))

    (note_trials_ahead if AHEAD else note_trials)(note)
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
