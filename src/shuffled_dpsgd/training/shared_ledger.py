"""One ledger for all ranks: rank 0 writes it, and nobody draws noise before all know it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from shuffled_dpsgd.core.ledger import Ledger, LedgerEntry
from shuffled_dpsgd.distributed.agreement import agree, first_does
from shuffled_dpsgd.distributed.world import World


class SharedLedger:
    """A `Ledger` on rank 0, and what it counts on every other rank.

    `record` and `adopt` are collective. `record` returns on any rank only after every rank has
    asked for the same entry and rank 0 has it on disk. Only seeded runs have a key.
    """

    def __init__(
        self,
        world: World,
        *,
        open_file: Callable[[], Ledger],
        in_memory: Callable[[], Ledger],
        has_key: bool,
    ) -> None:
        self._world = world
        opened: list[Ledger] = []

        def opening() -> tuple[tuple[LedgerEntry, ...], bytes, Path | None]:
            ledger = open_file()
            opened.append(ledger)
            return ledger.entries(), ledger.key if has_key else b"", ledger.path

        entries, self._key, self._path = first_does(world, opening)
        self._ledger = opened[0] if opened else in_memory()
        if not opened:
            self._ledger.adopt(entries, durable=False)

    @property
    def spent(self) -> int:
        """Number of distinct releases so far, those of crashed attempts included."""
        return self._ledger.spent

    @property
    def remaining(self) -> int:
        """Number of releases the budget still allows."""
        return self._ledger.remaining

    @property
    def path(self) -> Path | None:
        """The file that rank 0 writes, or None when the ledger lives in memory only."""
        return self._path

    @property
    def key(self) -> bytes:
        """The secret of this ledger's tokens, which all ranks have and rank 0 keeps."""
        return self._key

    @property
    def repeated_steps(self) -> int:
        """Steps that were released more than once, with different sums."""
        return self._ledger.repeated_steps

    @property
    def own_key(self) -> bytes:
        """On rank 0, the secret of the file."""
        return self._ledger.key

    def allows(self, step: int, *, secure: bool) -> bool:
        """Whether a release at `step` may stay within the budget."""
        return self._ledger.allows(step, secure=secure)

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every release so far, in order; part of a checkpoint."""
        return self._ledger.entries()

    def record(self, *, step: int, token: str) -> LedgerEntry:
        """Account for a release before it happens, once all ranks agree which one it is.

        Without a key tokens are random, and rank 0's is the one that counts.
        """
        facts = {"step": step} | ({"release": token} if self._key else {})
        agree(
            self._world,
            facts,
            remedy="the ranks are about to release different things: nothing was released; resume "
            "all of them from one checkpoint",
        )

        written = first_does(self._world, lambda: self._ledger.record(step=step, token=token))
        if not self._world.leads:
            self._ledger.record(step=step, token=written.token)
        return written

    def adopt(self, entries: Iterable[LedgerEntry], *, durable: bool) -> None:
        """Count the releases a checkpoint knows of, as `Ledger.adopt` does."""
        known = tuple(entries)
        first_does(self._world, lambda: self._ledger.adopt(known, durable=durable))
        if not self._world.leads:
            self._ledger.adopt(known, durable=False)
