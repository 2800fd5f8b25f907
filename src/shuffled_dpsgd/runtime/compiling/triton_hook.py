"""Hands what Triton is about to compile to workers, and lets Triton find it on disk.

Only kernels of this package. A variant that several threads need at once is compiled once: the
others wait for it. A thread that has to wait announces first what else its work needs. What a
worker does not compile is compiled here, as if there were no workers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from shuffled_dpsgd.runtime.compiling.announcements import announce, is_announcing, is_urgent
from shuffled_dpsgd.runtime.compiling.requests import (
    CompileRequest,
    NotNamedError,
    encode,
    key_on_disk,
    request_of,
)
from shuffled_dpsgd.runtime.compiling.workers import Answer, WorkerError, Workers, WorkersHangError
from shuffled_dpsgd.runtime.interpreter_share import SHARE
from shuffled_dpsgd.runtime.notices import say_once

PROJECT = "shuffled_dpsgd."
# What Triton's method must be given for its replacement to stand in for it.
_PARAMETERS = ("key", "signature", "device", "constexprs", "options", "attrs", "warmup")
# Triton cuts names of files at this length.
_LONGEST_NAME = 150
# Module and name of a kernel, device, and Triton's key.
Variant = tuple[str, str, int, str]


class TritonHook:
    """Stands in for the method by which Triton compiles a variant that it has not in memory.

    `workers` are asked; None if they are of no use. `tally` counts where variants came from: "on
    disk", "a worker" or "this process".
    """

    def __init__(
        self, compile_here: Callable[..., Any], workers: Workers, get_ready: Callable[[], None]
    ) -> None:
        self.workers: Workers | None = workers
        self.tally: Counter[str] = Counter()
        self._compile_here = compile_here
        self._get_ready = get_ready
        # Held while a variant is compiled.
        self._turns: dict[Variant, threading.Lock] = {}
        # Asked for and not on disk yet, or why they could not be asked for.
        self._lock = threading.Lock()
        self._asked: dict[Variant, Answer | str] = {}

    def compile(self, kernel: Any, key: str, signature: Any, device: int, *rest: Any) -> Any:
        """A compiled variant; the arguments are those of Triton's method.

        None in an announcement, which Triton takes for a launch that is not wanted.
        """
        function = kernel.fn
        if not function.__module__.startswith(PROJECT):
            return self._compile_here(kernel, key, signature, device, *rest)
        self._get_ready()
        variant = (function.__module__, function.__qualname__, device, key)
        request = request_of(kernel, signature, device, *rest)
        if is_announcing():
            if not is_on_disk(request):
                self._ask(variant, request)
            return None
        with _held(self._turns.setdefault(variant, threading.Lock())):
            found = kernel.device_caches[device][0].get(key)
            if found is not None:
                return found
            failure = self._prepare(variant, request)
            found = self._compile_here(kernel, key, signature, device, *rest)
        if failure is not None:
            say_once(
                f"{variant[1]} was compiled in this process, and the first steps take "
                f"longer: a process that was to do it failed ({failure})"
            )
        return found

    def close(self) -> None:
        """Ask nobody from now on, and leave open nothing that nobody waits for."""
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()
        with self._lock:
            for answer in self._asked.values():
                if isinstance(answer, Answer):
                    answer.forgo()

    def _prepare(self, variant: Variant, request: CompileRequest) -> str | None:
        """Have a variant compiled by a worker, unless it is on disk; returns why it is not there.

        None if workers have left because there was nothing to do for them.
        """
        if variant not in self._asked and is_on_disk(request):
            self.tally["on disk"] += 1
            return None
        self._ask(variant, request)
        announce()
        failure = self._wait(variant)
        found = is_on_disk(request)
        self.tally["a worker" if found else "this process"] += 1
        if found or failure is not None:
            return None if found else failure
        if self.workers is not None and not self.workers.have_left:
            self.workers = None
            return "what it compiled is not found"
        return None

    def _ask(self, variant: Variant, request: CompileRequest) -> None:
        """Ask for a variant that has not been asked for, if there are workers."""
        workers = self.workers
        with self._lock:
            if workers is None or workers.have_left or variant in self._asked:
                return
            try:
                self._asked[variant] = workers.ask(encode(request), is_urgent=is_urgent())
            except WorkerError as error:
                if not workers.have_left:
                    self._asked[variant] = str(error)
            except (NotNamedError, TypeError, AttributeError, ValueError) as error:
                self._asked[variant] = f"{type(error).__name__}: {error}"

    def _wait(self, variant: Variant) -> str | None:
        """Why no worker has compiled a variant; None if one has, or there are none."""
        answer = self._asked.get(variant)
        if not isinstance(answer, Answer):
            return answer
        try:
            with SHARE.given_back():
                answer.wait()
        except WorkersHangError as error:
            self.workers = None
            return str(error)
        except WorkerError as error:
            return str(error)
        finally:
            del self._asked[variant]
        return None


@contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock, and let other threads run while this one waits for it."""
    with SHARE.given_back() if lock.locked() else nullcontext():
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_on_disk(request: CompileRequest) -> bool:
    """Whether Triton is going to find the variant in its cache."""
    if importlib.import_module("triton.compiler.compiler").knobs.compilation.always_compile:
        return False
    cache = importlib.import_module("triton.runtime.cache")
    name = f"{request.source.name[:_LONGEST_NAME]}.json"
    return name in (cache.get_cache_manager(key_on_disk(request)).get_group(name) or {})


def install(workers: Workers, get_ready: Callable[[], None]) -> TritonHook | None:
    """Have Triton ask these workers from now on; None if this release is not understood.

    `get_ready` is called before each compilation.
    """
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    method = getattr(jit, "_do_compile", None)
    if method is None or tuple(inspect.signature(method).parameters)[1:] != _PARAMETERS:
        return None
    hook = TritonHook(method, workers, get_ready)

    @functools.wraps(method)
    def compile_variant(
        kernel: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any,
        attrs: Any, warmup: Any,
    ) -> Any:  # fmt: skip
        return hook.compile(kernel, key, signature, device, constexprs, options, attrs, warmup)

    jit._do_compile = compile_variant
    return hook
