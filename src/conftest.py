"""Doctests import every module; those of Triton kernels only where Triton is installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["**/triton_*.py"]
