"""Settings every test shares: one thread per worker, no hub, Triton interpreted without a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

# Triton reads this when it is imported, which a compiler may do before any kernel's test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
