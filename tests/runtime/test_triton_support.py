"""Triton is asked for in one way, and can be switched off."""

from __future__ import annotations

import importlib.util

import pytest

from shuffled_dpsgd.runtime.triton_support import triton_available


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    triton_available.cache_clear()


@pytest.mark.parametrize(("value", "installed"), [("1", True), ("1", False), ("0", True)])
def test_triton_is_used_if_installed_and_not_switched_off(
    value: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHUFFLED_DPSGD_TRITON", value)
    spec = importlib.util.find_spec("torch") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert triton_available() == (installed and value == "1")
    monkeypatch.undo()
    triton_available.cache_clear()
