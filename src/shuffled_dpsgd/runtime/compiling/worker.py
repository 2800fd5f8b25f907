"""The processes that compile: one that imports Triton, and as many forks of it as may work.

They touch no GPU and import no torch. Each takes a request from the sockets they share, compiles it
into Triton's cache on disk, and answers. They leave when the process that started them is gone, or
has not asked for anything for a minute.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.runtime.compiling.ahead import (
    Launch,
    chip_here,
    launches_of,
    only_compile,
)
from shuffled_dpsgd.runtime.compiling.torch_free import leave_torch_out

if TYPE_CHECKING:
    from shuffled_dpsgd.runtime.compiling.requests import CompileRequest

# No request for so long: there is nothing left to compile.
IDLE_SECONDS = 60.0
# A compilation that takes longer hangs; its process is ended.
MOST_SECONDS = 110
DONE = b"done"
# Processes that compile before they are asked; the system lets others go first.
MOST_AHEAD = 10
_NICENESS = 10
# A file that all forks share, of which they lock a byte for each variant.
_turns: int | None = None
# Where a worker's standard error goes: the compiler writes there what its exceptions leave out.
_complaints: int | None = None
_KERNEL = re.compile(rb"^@(triton|gluon)\.jit\b", re.MULTILINE)


def main(descriptors: Sequence[int], workers: int, *, is_early: bool = False) -> None:
    """Serve requests that come over sockets, those of the first socket first.

    Returns when nobody is there any more. Processes that are started early, before it is known
    whether there will be a run, begin with what every run needs.
    """
    global _turns
    lanes = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    asker = os.getppid()
    leave_torch_out()
    _turns = os.memfd_create("variants")
    reason = _get_ready()
    # For whoever asks: meanwhile this process imports.
    forks = [_fork(_build_driver)]
    modules = _import_until_asked(lanes)
    if is_early and not _is_asked(lanes):
        forks.append(_fork(partial(_compile_ahead, modules, lanes, workers, asker)))
    # With all kernels on disk there is never a request, and nothing is forked.
    asked = select.select(lanes, [], [], IDLE_SECONDS)[0]
    if asked and asked[0].recv(1, socket.MSG_PEEK):
        forks += [_fork(partial(_serve_alone, lanes, reason)) for _ in range(workers)]
    for lane in lanes:
        lane.close()
    for fork in forks:
        os.waitpid(fork, 0)


def _get_ready() -> str | None:
    """Do what all forks would have to do; returns what went wrong."""
    try:
        importlib.import_module("triton.experimental.gluon")
        importlib.import_module("triton.runtime.cache").triton_key()
    except Exception as error:
        return _words(error)
    return None


def _build_driver() -> None:
    """Have Triton's driver in the cache, a C program, by the time that somebody loads it."""
    try:
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()
    except Exception:  # It is then built where it is needed.
        return


def _compile_ahead(
    modules: Sequence[ModuleType], lanes: Sequence[socket.socket], workers: int, asker: int
) -> None:
    """Compile what a run with these modules is likely to ask for, by a few processes at a time."""
    for lane in lanes:
        lane.close()  # Whoever asks must not take these processes for some that answer.
    chip = chip_here()
    launches = [] if chip is None else launches_of(modules)
    if not launches:
        return
    assert chip is not None
    os.nice(_NICENESS)
    # A byte is read by one process alone, and names what it compiles next.
    turns, numbers = os.pipe()
    os.write(numbers, bytes(range(len(launches))))
    os.close(numbers)
    work = partial(_take_turns, turns, launches, chip, asker)
    for fork in [_fork(work) for _ in range(min(workers, MOST_AHEAD, len(launches)))]:
        os.waitpid(fork, 0)


def _take_turns(turns: int, launches: Sequence[Launch], chip: int, asker: int) -> None:
    """Compile what no other process does, one after the other, until the asker has ended."""
    only_compile(chip)
    while (turn := os.read(turns, 1)) and Path(f"/proc/{asker}").exists():
        signal.alarm(MOST_SECONDS)
        with suppress(Exception):  # Whoever asks for it is told.
            launches[turn[0]]()
        signal.alarm(0)


def _import_until_asked(lanes: Sequence[socket.socket]) -> list[ModuleType]:
    """Import modules of kernels for all forks, as long as nobody waits for the first of them."""
    found = []
    for name in kernel_modules():
        if _is_asked(lanes):
            break
        try:
            found.append(importlib.import_module(name))
        except Exception:  # Whoever asks for one of its kernels is told.
            continue
    return found


def _is_asked(lanes: Sequence[socket.socket]) -> bool:
    return bool(select.select(lanes, [], [], 0)[0])


def kernel_modules() -> Iterator[str]:
    """The modules of this package that define kernels."""
    package = Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        if _KERNEL.search(path.read_bytes()):
            parts = path.relative_to(package.parent).with_suffix("").parts
            yield ".".join(parts)


def _fork(work: Callable[[], None]) -> int:
    fork = os.fork()
    if fork == 0:
        try:
            work()
        finally:
            os._exit(0)
    return fork


def _serve_alone(lanes: Sequence[socket.socket], reason: str | None) -> None:
    """`serve` in a process that does nothing else, and whose standard error nobody reads."""
    global _complaints
    _complaints = os.memfd_create("complaints")
    os.dup2(_complaints, 2)
    serve(lanes, reason)


def serve(lanes: Sequence[socket.socket], reason: str | None) -> None:
    """Answer requests until there are none; with a `reason` why there is no other answer."""
    for lane in lanes:
        lane.setblocking(False)
    while (connection := _next(lanes)) is not None:
        with connection:
            signal.alarm(MOST_SECONDS)
            request = read_all(connection)
            answer = reason.encode() if reason else compile_one(request)
            signal.alarm(0)
            with suppress(OSError):  # Whoever asked may have ended.
                connection.sendall(answer)


def _next(lanes: Sequence[socket.socket]) -> socket.socket | None:
    """The connection of the next request; None if nobody is there, or asks for anything."""
    while ready := select.select(lanes, [], [], IDLE_SECONDS)[0]:
        first = min(ready, key=lanes.index)
        try:
            _, descriptors, _, _ = socket.recv_fds(first, 16, 1)
        except BlockingIOError:
            continue  # Another worker was quicker.
        return socket.socket(fileno=descriptors[0]) if descriptors else None
    return None


def read_all(connection: socket.socket) -> bytes:
    """What the other end writes until it closes, or has ended."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def compile_one(text: bytes) -> bytes:
    """Compile what an encoded request asks for; returns `DONE`, or what went wrong."""
    from shuffled_dpsgd.runtime.compiling import requests

    if _complaints is not None:
        os.ftruncate(_complaints, 0)
        os.lseek(_complaints, 0, os.SEEK_SET)
    try:
        request = requests.decode(text)
        requests.adopt(request.environment)
        compile_request(request)
    except Exception as error:
        return "; ".join([_words(error), *_complained()]).encode()
    return DONE


def _complained() -> list[str]:
    """The first line that the compiler called an error, if there is one."""
    if _complaints is None:
        return []
    text = os.pread(_complaints, 1 << 16, 0).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if "error:" in line]
    return [line[:300] for line in lines[:1]]


def compile_request(request: CompileRequest) -> None:
    """Compile into Triton's cache on disk, unless it is there."""
    compiler = importlib.import_module("triton.compiler.compiler")
    source = request.source
    with _alone(request), _building_launcher(request.target.backend, source):
        compiler.compile(source, target=request.target, options=request.options)


@contextmanager
def _alone(request: CompileRequest) -> Iterator[None]:
    """Have a variant compiled by one process at a time: the next one finds it on disk.

    It may be asked for while it is compiled ahead.
    """
    from shuffled_dpsgd.runtime.compiling import requests

    if _turns is None:
        yield
        return
    place = int(requests.key_on_disk(request)[:15], 16)
    fcntl.lockf(_turns, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(_turns, fcntl.LOCK_UN, 1, place)


@contextmanager
def _building_launcher(backend: str, source: Any) -> Iterator[None]:
    """Meanwhile have the kernel's launcher built, which goes into the same cache.

    Up to Triton 3.6 it is a C program that depends on the types of the arguments. Descriptors among
    them are another matter: their launcher depends on the compiled kernel.
    """
    driver = importlib.import_module("triton.backends.nvidia.driver")
    has_descriptors = "tensordesc" in str(source.signature)
    if backend != "cuda" or has_descriptors or not hasattr(driver, "make_launcher"):
        yield
        return

    def build() -> None:
        try:
            driver.CudaLauncher(source, _NoMetadata())
        except Exception:  # It is then built where it is needed.
            return

    building = threading.Thread(target=build)
    building.start()
    try:
        yield
    finally:
        building.join()


class _NoMetadata:
    """What is known of a kernel before it is compiled."""

    def __getattr__(self, name: str) -> None:
        return None


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
