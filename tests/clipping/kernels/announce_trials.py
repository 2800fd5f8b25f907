"""What the trials announce to workers on a Hopper GPU, without one: run by `test_announced_trials`.

Prints, as JSON, the kernels that each trial asks for before it waits for the first of them.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from shuffled_dpsgd.clipping.kernels import trials
from shuffled_dpsgd.permutation.move import kernel_route
from shuffled_dpsgd.runtime.compiling import triton_hook
from shuffled_dpsgd.runtime.compiling.announcements import announce, announced_by
from shuffled_dpsgd.training import noise_route

TRIALS = [
    trials.try_gram,
    trials.try_two_part_gram,
    trials.try_wide_gram,
    trials.try_products,
    trials.try_gluon_products,
    trials.try_gluon_strips,
    trials.try_split_products,
    trials.try_rows,
    trials.try_norm_layers,
    trials.try_tables,
    trials.try_tied_tables,
    trials.try_casts,
    kernel_route.try_kernels,
    noise_route.try_kernel,
]


class Listener:
    """Stands in for workers: writes down what is asked for, and never answers."""

    have_left = False

    def ask(self, request: str, *, is_urgent: bool) -> Any:
        asked.append(request)
        return SimpleNamespace()


asked: list[str] = []


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    triton_hook.encode = lambda request: request.function.fn.__name__
    triton_hook.is_on_disk = lambda request: False
    assert triton_hook.install(Listener(), lambda: None) is not None  # type: ignore[arg-type]
    found = {}
    for trial in TRIALS:
        asked.clear()
        with announced_by(lambda trial=trial: trial(torch.device("cpu"))):
            announce()
        found[trial.__name__] = sorted(asked)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
