"""A contest whose adapters have a process each, so that none leaves anything behind for the others.

On a CPU this matters. Where an adapter has made the heap large, the next one's gradients are laid
into pages that are mapped already; alone, a plain loop has hundreds of megabytes mapped anew in
every step. Rounds and blocks are those of `measure`, and only one process computes at a time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import measure
from benchmarks.adapters import Setting
from benchmarks.measure import Contest, Contestant
from benchmarks.workloads import workload
from shuffled_dpsgd.runtime import backends

# What a process can be asked.
PREPARE, BLOCK, HOST, BUSY, ROUTES = "prepare", "block", "host", "busy", "routes"


class ApartError(RuntimeError):
    """What an adapter's process raised, as text."""


class ApartContest(Contest):
    """All adapters on one workload, each in a process of its own."""

    def __init__(self, setting: Setting, adapters: Sequence[str]) -> None:
        super().__init__(setting, adapters)
        self._context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes: dict[str, Any] = {}

    def routes(self) -> dict[str, object]:
        """By adapter, for those that took any."""
        found = {each.adapter: self._ask(each, ROUTES) for each in self.running()}
        return {adapter: report for adapter, report in found.items() if report["taken"]}

    def close(self) -> None:
        for adapter in list(self._processes):
            self._end(adapter)

    def _end(self, adapter: str) -> None:
        process = self._processes.pop(adapter)
        process.kill()
        process.join()

    def _prepare(self, contestant: Contestant, warmup: int) -> None:
        here, there = self._context.Pipe()
        setting = self.setting
        facts = (setting.workload.name, str(setting.device), setting.bfloat16)
        precision = torch.get_float32_matmul_precision()
        process = self._context.Process(
            target=serve, args=(there, contestant.adapter, facts, precision), daemon=True
        )
        process.start()
        there.close()
        self._pipes[contestant.adapter] = here
        self._processes[contestant.adapter] = process
        contestant.peak_gib, contestant.step_peak_gib = self._ask(contestant, PREPARE, warmup)

    def _block(self, contestant: Contestant, steps: int) -> tuple[float, float]:
        found: tuple[float, float] = self._ask(contestant, BLOCK, steps)
        return found

    def _host(self, contestant: Contestant) -> float:
        return float(self._ask(contestant, HOST))

    def _busy(self, contestant: Contestant) -> float:
        return float(self._ask(contestant, BUSY))

    def _ask(self, contestant: Contestant, what: str, *numbers: int) -> Any:
        pipe = self._pipes[contestant.adapter]
        try:
            pipe.send((what, numbers))
            is_error, answer = pipe.recv()
        except TimeoutError:
            # Nobody waits for it any more, and it would compute while others are timed.
            self._end(contestant.adapter)
            raise
        except (EOFError, OSError) as error:
            raise ApartError("its process has ended") from error
        if is_error:
            raise ApartError(answer)
        return answer


def serve(pipe: Connection, adapter: str, facts: tuple[str, str, bool], precision: str) -> None:
    """One process: answers questions about its adapter until nobody asks any more."""
    name, where, bfloat16 = facts
    torch.set_float32_matmul_precision(precision)
    device = torch.device(where)
    setting = Setting(workload=workload(name), device=device, bfloat16=bfloat16)
    contestant = Contestant(adapter=adapter)

    def prepared(warmup: int) -> tuple[float | None, float | None]:
        measure.prepare(contestant, setting, warmup)
        return contestant.peak_gib, contestant.step_peak_gib

    answers: dict[str, Any] = {
        PREPARE: prepared,
        BLOCK: lambda steps: measure.time_block(contestant, device, steps),
        HOST: lambda: measure.time_host(contestant, device),
        BUSY: lambda: measure.time_busy(contestant, device),
        ROUTES: backends.report,
    }
    while True:
        try:
            what, numbers = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, answers[what](*numbers)))
        except measure.failures() as error:
            pipe.send((True, f"{type(error).__name__}: {error}"))
