"""Exact per-sample gradient clipping in one backward pass."""

from __future__ import annotations

from shuffled_dpsgd.clipping.engine import ClippingEngine

__all__ = ["ClippingEngine"]
