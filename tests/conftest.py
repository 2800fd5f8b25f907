"""Settings every test shares: one thread per worker, no hub, Triton interpreted without a GPU."""

from __future__ import annotations

import functools
import gc
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
import typer.testing

# Nothing that is imported while tests are collected is ever garbage.
gc.disable()
# A test that calls the command would otherwise build all of its verbs anew.
typer.testing._get_command = functools.cache(typer.testing._get_command)
if not torch.cuda.is_available():
    # Triton reads this when it is imported, which a compiler may do before any kernel's test.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Every seed is noted for accelerators that never come, with the whole stack of its caller.
    for accelerator in (torch.cuda.random, torch.xpu.random, torch.mtia):
        accelerator._lazy_call = lambda *_, **__: None


def pytest_collection_finish() -> None:
    """Spare the garbage collector what all modules hold: it took a tenth of the time of tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_earlier_runs() -> None:
    """Forget the runs of other tests, which train on the same rows."""
    succession = sys.modules.get("shuffled_dpsgd.training.succession")
    if succession is not None:
        succession._ON_ROWS.clear()
