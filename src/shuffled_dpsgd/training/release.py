"""One release: the sums of all ranks, a durable ledger entry, noise, and the update, in this order.

The ledger comes before the noise: a release that nobody wrote down would be spent unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from shuffled_dpsgd.distributed.exchange import Exchange
from shuffled_dpsgd.errors import BudgetExhaustedError
from shuffled_dpsgd.permutation import Permutation
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.training.ledger import Ledger
from shuffled_dpsgd.training.mechanism import Mechanism, Release
from shuffled_dpsgd.training.release_tokens import ReleaseTokens
from shuffled_dpsgd.training.shared_ledger import SharedLedger
from shuffled_dpsgd.training.update import GuardedOptimizer


class Releases:
    """Makes the releases of a run; `exhausted` says whether the ledger has refused one.

    `names` are those of the trainable parameters. Ledger and mechanism are given for each release,
    because tests and audits replace them.
    """

    def __init__(
        self,
        *,
        names: Iterable[str],
        tokens: ReleaseTokens,
        optimizer: GuardedOptimizer,
        exchange: Exchange | None,
        clock: Clock,
    ) -> None:
        self.exhausted = False
        self._names = tuple(names)
        self._tokens = tokens
        self._optimizer = optimizer
        self._exchange = exchange
        self._clock = clock

    def are_allowed(self, step: int, ledger: Ledger | SharedLedger) -> bool:
        """Whether the ledger allows a release at `step`."""
        return ledger.allows(self._tokens.of_step(step, ledger))

    def make(
        self,
        clipped: Mapping[str, torch.Tensor],
        *,
        step: int,
        ledger: Ledger | SharedLedger,
        mechanism: Mechanism,
        frame: Permutation | None,
    ) -> Release:
        """Make the clipped sums private and update with them; no reference to them is kept.

        Raises:
            BudgetExhaustedError: the ledger allows no further release; nothing was noised.
        """
        sums = {name: clipped[name].contiguous() for name in self._names}
        exchange = self._exchange
        if exchange is not None:
            with self._clock.part("exchange"):
                sums = exchange.reduce(sums)
        with self._clock.part("ledger"):
            self._record(sums, step, ledger)
        with self._clock.part("noise"):
            release = mechanism.privatize(sums, step=step, frame=frame)
        if exchange is not None:
            with self._clock.part("exchange"):
                sums = exchange.spread(sums)
        with self._clock.part("update"):
            self._optimizer.update(sums)
        return release

    def _record(
        self, sums: Mapping[str, torch.Tensor], step: int, ledger: Ledger | SharedLedger
    ) -> None:
        try:
            ledger.record(step=step, token=self._tokens.of_step(step, ledger, sums))
        except BudgetExhaustedError:
            self.exhausted = True
            raise
