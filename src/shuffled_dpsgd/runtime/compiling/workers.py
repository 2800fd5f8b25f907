"""Starts the processes that compile, and asks them.

Whatever happens to them, a kernel is compiled: an answer other than `DONE` means that whoever asked
does it itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

from shuffled_dpsgd.runtime.compiling.worker import DONE, MOST_SECONDS, read_all

MOST_WORKERS = 14
# Processes that have not answered anyone for so long hang. Somewhat longer than a worker may take,
# so that one that hangs alone is ended first.
PATIENCE_SECONDS = MOST_SECONDS + 10.0
_LOOK_EVERY_SECONDS = 1.0
_CODE = """import sys
sys.path[:] = {path!r}
from shuffled_dpsgd.runtime.compiling.worker import main
main({descriptors}, {workers}, is_early={is_early})
"""


class WorkerError(Exception):
    """A request that was not fulfilled, and why."""


class WorkersHangError(WorkerError):
    """No request is being fulfilled."""


class Answer:
    """What a worker is going to say to a request."""

    def __init__(self, connection: socket.socket, workers: Workers) -> None:
        self._connection = connection
        self._workers = workers
        self._is_waited_for = False

    def wait(self) -> None:
        """Return once the request has been compiled.

        Raises:
            WorkerError: it has not been, for whatever reason.
        """
        self._is_waited_for = True
        try:
            with self._connection:
                self._wait_for_a_sign()
                answer = read_all(self._connection)
        except OSError as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error
        self._workers.last_sign = time.monotonic()
        if answer != DONE:
            raise WorkerError(answer.decode() or "the process that compiled it has ended")

    def forgo(self) -> None:
        """Hear of the request no more, unless somebody waits for it."""
        if not self._is_waited_for:
            self._connection.close()

    def _wait_for_a_sign(self) -> None:
        """Others may be served first: it is enough that anyone is."""
        self._connection.settimeout(_LOOK_EVERY_SECONDS)
        while True:
            try:
                self._connection.recv(1, socket.MSG_PEEK)
                return
            except TimeoutError:
                silent = time.monotonic() - self._workers.last_sign
                if silent > PATIENCE_SECONDS:
                    raise WorkersHangError(f"no answer in {silent:.0f} s") from None


class Workers:
    """Processes that compile; they are started here and leave by themselves."""

    def __init__(self, workers: int | None = None, *, is_early: bool = False) -> None:
        """Start them; early ones compile what every run needs before they are asked.

        Raises:
            OSError: the system does not allow it.
        """
        if not sys.executable:
            raise OSError("it is not known which program runs Python")
        self.last_sign = time.monotonic()
        # What is urgent, and what is not.
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self._urgent, self._patient = lanes = [ours for ours, _ in pairs]
        for lane in lanes:
            lane.settimeout(PATIENCE_SECONDS)
        theirs = [theirs for _, theirs in pairs]
        descriptors = [lane.fileno() for lane in theirs]
        code = _CODE.format(
            path=[str(folder) for folder in sys.path],
            descriptors=descriptors,
            workers=workers or fair_share(),
            is_early=is_early,
        )
        try:
            # A session of its own: Ctrl-C in a terminal is for the run.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except BaseException:
            self.close()
            raise
        finally:
            for lane in theirs:
                lane.close()
        # Leaves no dead process behind, whenever it ends.
        threading.Thread(target=self.process.wait, name="compile workers", daemon=True).start()

    @property
    def have_left(self) -> bool:
        """Whether they have ended of their own accord, because there was nothing to do."""
        return self.process.returncode == 0

    def ask(self, request: bytes, *, is_urgent: bool = True) -> Answer:
        """Have a request compiled into Triton's cache; the answer says when it has been.

        What is not urgent waits for what is.

        Raises:
            WorkerError: nobody is there to ask.
        """
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                lane = self._urgent if is_urgent else self._patient
                socket.send_fds(lane, [b"compile"], [theirs.fileno()])
            ours.settimeout(PATIENCE_SECONDS)
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
        except OSError as error:
            if ours is not None:
                ours.close()
            raise WorkerError(f"{type(error).__name__}: {error}") from error
        return Answer(ours, self)

    def close(self) -> None:
        """Let the processes go; those that are compiling go once they are done."""
        self._urgent.close()
        self._patient.close()


def fair_share() -> int:
    """As many as there are cores for this process among those of a launch, but one."""
    cores = len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, min(MOST_WORKERS, cores - 1))
