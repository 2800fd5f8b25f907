"""Lets several threads launch Triton kernels for the first time, whatever the release of Triton.

Up to Triton 3.6, the C code that launches a kernel is a Python extension module, one for each list
of argument types, and all have the same name. Python keeps one module object for a name: a module
that is loaded a second time is written into whichever object has the name by then. A thread that
has just loaded its launcher may so find another kernel's in it, which passes its arguments on as if
they had other types. Triton 3.7 and later have one launcher for all kernels.

In all releases a compiled kernel has its launcher before it is loaded onto the GPU. A thread that
finds the launcher of a kernel that another thread is about to load would launch nothing.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.runtime.triton_support import triton_available

_BACKENDS = ("nvidia", "amd")
_LOADER = "_load_module_from_path"
_lock = threading.Lock()


@functools.cache
def make_safe_for_threads() -> bool:
    """Have launchers loaded one at a time and kept apart; False if this release is not understood.

    Does nothing where it is not needed.
    """
    if not triton_available():
        return True
    compiler = importlib.import_module("triton.compiler.compiler")
    safe = wait_for_loading(compiler.CompiledKernel)
    if safe and any(_has_many_launchers(backend) for backend in _BACKENDS):
        safe = keep_apart(importlib.import_module("triton.runtime.build"))
    if not safe:
        say_once(
            "Kernels are compiled one after the other, and the first step takes longer: this "
            "release of Triton loads kernels in a way that threads might mix up"
        )
    return safe


def wait_for_loading(compiled: type) -> bool:
    """Have a kernel's launcher handed out once the kernel is loaded, whoever loads it.

    False if this class of compiled kernels is not understood.
    """
    launcher: Any = getattr(compiled, "run", None)
    load: Any = getattr(compiled, "_init_handles", None)
    if not isinstance(launcher, property) or load is None:
        return False

    def run(kernel: Any) -> Any:
        if kernel.function is None:
            with vars(kernel).setdefault("_loading", threading.Lock()):
                load(kernel)
        assert launcher.fget is not None
        return launcher.fget(kernel)

    compiled.run = property(run)  # type: ignore[attr-defined]
    return True


def _has_many_launchers(backend: str) -> bool:
    """Whether this kind of GPU has a launcher for each list of argument types."""
    name = f"triton.backends.{backend}.driver"
    try:
        return hasattr(importlib.import_module(name), "make_launcher")
    except ImportError:
        return False  # A Triton that was built without it launches nothing there.


def keep_apart(build: ModuleType) -> bool:
    """Replace the module's loader by one whose results no later load can change."""
    load = getattr(build, _LOADER, None)
    if load is None:
        return False
    if not isinstance(load, _OneAtATime):
        setattr(build, _LOADER, _OneAtATime(load))
    return True


class _OneAtATime:
    """Loads a module while no other is loaded, and returns what it holds at that moment."""

    def __init__(self, load: Callable[..., ModuleType]) -> None:
        self._load = load

    def __call__(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        with _lock:
            return SimpleNamespace(**vars(self._load(*args, **kwargs)))
