"""How a test starts ranks, and what it hears of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
# Later ones count first. What transformers deprecates and peft still calls fails nothing.
WARNINGS = (
    *("-W", "error::FutureWarning"),
    *("-W", "default::FutureWarning:transformers.modeling_utils"),
)


class Launcher:
    """Starts launches one at a time, in forks of one process that has imported torch."""

    def __init__(self) -> None:
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._server = subprocess.Popen(
            [sys.executable, *WARNINGS, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        self._folder = Path()
        self._temporary: list[tempfile.TemporaryDirectory[str]] = []

    def start(
        self,
        module: str,
        function: str,
        *,
        ranks: int = 2,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> list[int]:
        """Start `ranks` processes that call the function; their process ids."""
        self._temporary.append(tempfile.TemporaryDirectory())
        self._folder = Path(self._temporary[-1].name)
        order = {
            "module": module,
            "function": function,
            "ranks": ranks,
            "arguments": arguments,
            "environment": environment or {},
            "folder": str(self._folder),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._hear()

    def wait(self) -> list[int]:
        """The exit codes of the ranks started last, negative for signals."""
        return self._hear()

    def error(self, rank: int) -> str:
        """What a rank that failed said at last."""
        return (self._folder / f"rank-{rank}.txt").read_text(encoding="utf-8")

    def run(self, module: str, function: str, *, ranks: int = 2, **arguments: Any) -> list[Any]:
        """What the function returned on every rank; all of them must end well."""
        self.start(module, function, ranks=ranks, **arguments)
        codes = self.wait()
        failed = [rank for rank, code in enumerate(codes) if code]
        assert not failed, "\n".join(
            f"rank {r} ended with {codes[r]}:\n{self._said(r)}" for r in failed
        )
        return self.results(ranks)

    def results(self, ranks: int) -> list[Any]:
        """What the ranks of the last launch returned."""
        return [
            torch.load(self._folder / f"rank-{rank}.pt", weights_only=False)
            for rank in range(ranks)
        ]

    def close(self) -> None:
        self._server.communicate()
        for folder in self._temporary:
            folder.cleanup()

    def _said(self, rank: int) -> str:
        path = self._folder / f"rank-{rank}.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def _hear(self) -> list[int]:
        assert self._server.stdout is not None
        heard: list[int] = json.loads(self._server.stdout.readline())
        return heard


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
