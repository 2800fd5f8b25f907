"""Modules of kernels are imported without torch, as they are in a process that only compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shuffled_dpsgd.runtime.compiling.worker import kernel_modules

CODE = """
import sys
from shuffled_dpsgd.runtime.compiling.torch_free import leave_torch_out
leave_torch_out()
import shuffled_dpsgd.clipping.kernels.plain as plain
import torch
from torch.nn import functional as F
assert plain.tile_sq_norms.__module__ == "shuffled_dpsgd.clipping.kernels.plain"
assert not hasattr(sys.modules["shuffled_dpsgd.clipping"], "ClippingEngine")
class Module(torch.nn.Module):
    size: "int | torch.Tensor" = 1
@torch.no_grad()
def function(): ...
assert {torch.float16: 1, torch.bfloat16: 2}
assert "numpy" not in sys.modules
"""
KERNELS = """
import importlib, sys
from shuffled_dpsgd.runtime.compiling.torch_free import leave_torch_out
leave_torch_out()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "numpy" not in sys.modules
"""


def run(code: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_in_torch_stand_for_nothing() -> None:
    run(CODE)


def test_all_kernels_are_imported_without_torch() -> None:
    pytest.importorskip("triton")
    modules = [*kernel_modules()]
    assert "shuffled_dpsgd.training.triton_noise" in modules
    assert "shuffled_dpsgd.clipping.kernels.gluon.weighted_sums" in modules
    run(KERNELS, *modules)
