"""Modules that need Triton at import; pytest collects doctests from all the others."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*/kernels/triton/*", "*/kernels/gluon/*", "*/triton_*.py"]
