"""One ledger for all ranks: rank 0 writes it, and nobody draws noise before all know it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shuffled_dpsgd.distributed.agreement import agree, first_does
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.training.ledger import Ledger


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

        def opening() -> tuple[tuple[str, ...], bytes, Path | None]:
            ledger = open_file()
            opened.append(ledger)
            return ledger.tokens(), ledger.key if has_key else b"", ledger.path

        tokens, self._key, self._path = first_does(world, opening)
        self._ledger = opened[0] if opened else in_memory()
        if not opened:
            self._ledger.adopt(tokens, durable=False)

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

    def allows(self, beginning: str) -> bool:
        """Whether recording a token may stay within the budget, given what it begins with."""
        return self._ledger.allows(beginning)

    def tokens(self) -> tuple[str, ...]:
        """Every release so far, in order; part of a checkpoint."""
        return self._ledger.tokens()

    def record(self, *, step: int, token: str) -> None:
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

        def write() -> str:
            self._ledger.record(step=step, token=token)
            return token

        written = first_does(self._world, write)
        if not self._world.leads:
            self._ledger.record(step=step, token=written)

    def adopt(self, tokens: tuple[str, ...], *, durable: bool) -> None:
        """Count the releases a checkpoint knows of, as `Ledger.adopt` does."""
        first_does(self._world, lambda: self._ledger.adopt(tokens, durable=durable))
        if not self._world.leads:
            self._ledger.adopt(tokens, durable=False)
