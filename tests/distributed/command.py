"""The command as every rank of a launch runs it; run by `nursery.py` and by torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from typing import Any
from unittest import mock

from shuffled_dpsgd.cli.main import app


def call(arguments: list[str]) -> dict[str, Any]:
    """Exit status and output of `shuffled-dpsgd ARGUMENTS`."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = app(args=arguments, standalone_mode=False) or 0
        except SystemExit as error:
            status = error.code
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def call_without_room(arguments: list[str]) -> dict[str, Any]:
    """As `call`, on devices that have no room for the whole model."""
    with mock.patch("shuffled_dpsgd.tasks.run.has_room", return_value=False):
        return call(arguments)


def die_once(record: dict[str, Any]) -> None:
    """A tracker that kills its process at step 2, the first time."""
    if record["step"] == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
