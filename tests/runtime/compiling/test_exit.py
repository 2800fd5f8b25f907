"""A process that had kernels compiled by others ends without a word, and lets them go."""

from __future__ import annotations

import socket
import subprocess
import sys
from unittest import mock

import pytest

from shuffled_dpsgd.runtime.compiling import workers
from shuffled_dpsgd.runtime.compiling.triton_hook import TritonHook
from shuffled_dpsgd.runtime.compiling.workers import Answer, Workers

# Holds on to all that has a socket, which Python then takes apart last, and with a warning.
CODE = """
import contextlib, sys, threading, time, types
# As much as a rehearsal needs of torch, whose import takes longer than all the rest.
device = types.SimpleNamespace(type="cpu")
sys.modules["torch"] = types.SimpleNamespace(no_grad=contextlib.nullcontext)
from shuffled_dpsgd.runtime import rehearsals
from shuffled_dpsgd.runtime.compiling import service, workers
from shuffled_dpsgd.runtime.compiling.triton_hook import TritonHook

# Other processes that take nothing, and end when they are let go.
workers._CODE = "import socket; socket.socket(fileno={descriptors}[1]).recv(1)"
early, asked = workers.Workers(1), workers.Workers(1)
hook = TritonHook(None, asked, None)
service._early.append(early)
service._hooks.append(hook)
never_waited_for = hook._asked["variant"] = asked.ask(b"kernel")

is_running = threading.Event()

def rehearse():
    is_running.set()
    time.sleep(0.3)
    print("rehearsed while open:", asked._urgent.fileno() >= 0)

rehearsals.REHEARSALS.add(None, rehearse, device)
is_running.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others are started on Linux alone")
def test_nothing_is_left_open_at_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert "rehearsed while open: True" in done.stdout


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(workers, "_CODE", "")
    return Workers(1)


def test_an_answer_that_somebody_waits_for_is_left_to_them(pool: Workers) -> None:
    hook = TritonHook(mock.Mock(), pool, mock.Mock())
    waited, other = (Answer(mock.Mock(), pool) for _ in range(2))
    waited._is_waited_for = True
    hook._asked = {("a", "b", 0, str(i)): each for i, each in enumerate((waited, other, "why"))}
    hook.close()
    assert hook.workers is None
    assert waited._connection.close.call_count == 0  # type: ignore[attr-defined]
    assert other._connection.close.call_count == 1  # type: ignore[attr-defined]
    assert pool._urgent.fileno() == pool._patient.fileno() == -1
    hook.close()


def test_nothing_is_left_open_where_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    monkeypatch.setattr(workers.socket, "socketpair", mock.Mock(side_effect=pairs))
    monkeypatch.setattr(workers.subprocess, "Popen", mock.Mock(side_effect=OSError("too many")))
    with pytest.raises(OSError, match="too many"):
        Workers(1)
    assert all(end.fileno() == -1 for pair in pairs for end in pair)
