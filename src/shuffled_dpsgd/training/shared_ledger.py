"""One ledger for all ranks: rank 0 writes it, and no rank draws noise before that."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shuffled_dpsgd.core.ledger import Ledger, LedgerEntry
from shuffled_dpsgd.distributed.agreement import agree, first_does, first_writes
from shuffled_dpsgd.distributed.world import World


class SharedLedger(Ledger):
    """The ledger's file on rank 0, and the same entries in memory on every other rank.

    `record` and `adopt` are collective. `record` returns on any rank only after every rank has
    asked for the same entry and rank 0 has it on disk. In a secure run tokens are random, each
    rank proposes its own, and rank 0's counts.
    """

    def __init__(self, world: World, *, secure: bool, path: str | Path | None, **plan: Any) -> None:
        self._world = world
        self._secure = secure

        def opened() -> tuple[tuple[LedgerEntry, ...], bytes, Path | None]:
            Ledger.__init__(self, **plan, path=path)
            return self.entries(), self.key, self._path

        entries, key, self._place = first_does(world, opened)
        if not world.leads:
            super().__init__(**plan)
            self.key = key
            super().adopt(entries, durable=False)

    @property
    def path(self) -> Path | None:
        """The file that rank 0 writes, or None when the ledger lives in memory only."""
        return self._place

    def record(self, *, step: int, token: str) -> LedgerEntry:
        """Account for a release before it happens, once all ranks agree which one it is."""
        agree(
            self._world,
            {"step": step} | ({} if self._secure else {"release": token}),
            remedy="the ranks are about to release different things: nothing was released; resume "
            "all of them from one checkpoint",
        )
        written: list[LedgerEntry] = []

        def write() -> str:
            written.append(Ledger.record(self, step=step, token=token))
            return written[0].token

        told = first_writes(self._world, write)
        return written[0] if written else super().record(step=step, token=told)

    def adopt(self, entries: Iterable[LedgerEntry], *, durable: bool) -> None:
        """Count the releases a checkpoint knows of, as `Ledger.adopt` does."""
        known = tuple(entries)
        first_does(self._world, lambda: Ledger.adopt(self, known, durable=durable))
        if not self._world.leads:
            super().adopt(known, durable=False)
