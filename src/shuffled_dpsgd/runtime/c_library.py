"""Compiles a C file of this package once on a machine, and loads it.

For loops that neither torch nor numpy has as one operation. The compiler is the system's own. What
it made is kept beside the verdicts of trials, under a name that depends on the source, and holds
code for several kinds of processors where the compiler can do that. Where there is no compiler,
`CannotBuildError` says so, and a slower way must serve. `SHUFFLED_DPSGD_C=0` turns all of it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from shuffled_dpsgd.runtime.verdicts import cache_folder

SWITCH = "SHUFFLED_DPSGD_C"
_COMPILERS = ("cc", "gcc", "clang")
# No products joined with sums, which would round otherwise than numpy does.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Without code for several processors: some compilers and systems do not have it.
_SIMPLER = ((), ("-DONE_TARGET",))
_SECONDS = 120


class CannotBuildError(Exception):
    """There is no library, and why."""


def is_wanted() -> bool:
    """Whether the user has left compiled C switched on."""
    return os.environ.get(SWITCH, "1") != "0"


@functools.cache
def load_library(source: Path) -> ctypes.CDLL:
    """The library compiled from `source`.

    Raises:
        CannotBuildError: there is no compiler, or it fails, or its result cannot be loaded.
    """
    text = source.read_bytes()
    facts = " ".join((sys.platform, platform.machine(), *_FLAGS)).encode()
    kept = cache_folder() / f"{source.stem}-{hashlib.sha256(text + facts).hexdigest()[:16]}.so"
    try:
        if kept.exists():
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / kept.name
            _build(source, built)
            library = ctypes.CDLL(str(built))
            _keep(built, kept)
            return library
    except OSError as error:
        raise CannotBuildError(f"the library could not be loaded ({error})") from error


def _build(source: Path, target: Path) -> None:
    named = os.environ.get("CC", "").split()
    compiler = named or [next(filter(shutil.which, _COMPILERS), "")]
    if not compiler[0]:
        raise CannotBuildError("there is no C compiler")
    complaint = ""
    for simpler in _SIMPLER:
        command = [*compiler, *_FLAGS, *simpler, str(source), "-lm", "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuildError(f"the C compiler did not run ({error})") from error
        if done.returncode == 0:
            return
        complaint = (done.stderr.strip().splitlines() or ["no reason given"])[0]
    raise CannotBuildError(f"the C compiler failed: {complaint}")


def _keep(built: Path, kept: Path) -> None:
    """For the next process; written under another name first, since several may do it at once."""
    unfinished = kept.with_name(f".{kept.name}.{os.getpid()}")
    with suppress(OSError):  # A read-only home: the next process compiles again.
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, unfinished)
        unfinished.replace(kept)
