"""The one door: sums come in, a private gradient goes out, and nothing else does.

The order is the argument. The referee looks at the sums first, so that a fault costs nothing. The
ledger entry is durable before any noise is drawn: a release that nobody wrote down would be spent
unnoticed. The key of the noise depends on the entry and is forgotten with the step. The referee
looks at the release before the update sees it, and expects what the plan and the keys say: of the
mechanism it takes nothing. Only the private gradient reaches the optimizer.

No other code of this package calls a mechanism on sums of records or draws noise for them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from shuffled_dpsgd.core.banded import sensitivity
from shuffled_dpsgd.core.clip import ClippedSums, joint_norm
from shuffled_dpsgd.core.ledger import Ledger, fingerprint
from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.noise import Place, number, sketch
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import FIRST_STEPS, Referee
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.errors import BudgetExhaustedError, RefereeError, require

Tensors = dict[str, torch.Tensor]
EXCHANGE_RATE = 1 / 64
# Rounding of the sums of an exchange, relative to the sum of the norms that go into it.
EXCHANGE_ROOM = 1e-4


class Exchange(Protocol):
    """How the sums of several processes become one release."""

    def places(self) -> Mapping[str, Place]:
        """Which coordinates of the release this process makes private."""

    def reduce(self, sums: Tensors) -> Tensors:
        """This process's share of the total over all of them, a part of every tensor."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a few numbers over all processes."""

    def spread(self, shares: Tensors) -> Tensors:
        """Whole private gradients from everybody's shares."""


class SumFrame(Protocol):
    """Where the noise is drawn: as if the weights had never been permuted (for experiments)."""

    def enter(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Move the sums, in place, to where they would lie had nothing been permuted."""

    def leave(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Move them back."""


@dataclass(eq=False, kw_only=True)
class Door:
    """Makes the releases of `plan`; `exhausted` says whether the ledger has refused one.

    `update` receives the private gradients. `fingerprinted` tells sums apart in a seeded run: over
    all processes, where there are several. With `sharded`, a process has its rows of the total over
    all of them, and not sums of its own. Engine, referee, ledger and mechanism are given for each
    release, because audits replace them.
    """

    names: tuple[str, ...]
    plan: PrivacyPlan
    streams: RandomStreams
    update: Callable[[Mapping[str, torch.Tensor]], None]
    exchange: Exchange | None = None
    sharded: bool = False
    fingerprinted: Callable[[Mapping[str, torch.Tensor], bytes], str] = fingerprint
    timed: Callable[[str], AbstractContextManager[object]] = lambda part: nullcontext()
    exhausted: bool = False

    def __post_init__(self) -> None:
        self._draws: dict[int, bytes] = {}
        self._inspected: tuple[int, Tensors, torch.Tensor] | None = None
        noised = sorted(name for block in self.plan.blocks for name in block.parameters)
        require(noised == sorted(self.names), "plan", "every sum in one block", noised)
        rows, self._bands = self.plan.noise_rows or ((1.0,),), self.plan.bands
        scale = sensitivity(rows) if self.plan.noise_rows else 1.0
        self._weights = [[scale * weight for weight in row] for row in rows]

    def inspect(self, engine: ClippedSums, referee: Referee, *, step: int, drawn: int) -> None:
        """Have the referee look at this process's sums of `step`, of `drawn` records.

        Raises:
            RefereeError: they are not the clipped sums of those records.
        """
        self._inspected = None
        clipped = engine.clipped_sum()
        sums = {name: clipped[name].contiguous() for name in self.names}
        norms = self._norms(sums)
        count = engine.sample_norms.numel()
        norm = None if self.sharded else float(norms.norm())
        referee.inspect(sums, norm=norm, count=count, drawn=drawn)
        self._inspected = step, sums, norms

    def release(
        self,
        *,
        step: int,
        count: int,
        referee: Referee,
        ledger: Ledger,
        mechanism: ShuffledGaussianMechanism,
        frame: SumFrame | None = None,
    ) -> Tensors:
        """Make the inspected sums private, over `count` records of all processes, and update.

        Returns what the mechanism does: norms that are not private.

        Raises:
            RefereeError: nobody has looked at these sums, or their total or their noise is wrong.
            BudgetExhaustedError: the ledger allows no further release; nothing was noised.
        """
        inspected, self._inspected = self._inspected, None
        if inspected is None or inspected[0] != step:
            raise RefereeError(f"the sums of step {step} were not inspected; nothing was released")
        _, sums, norms = inspected
        if self.sharded:
            referee.inspect_rows(sums)
        if self.exchange is not None:
            with self.timed("exchange"):
                sums = self._reduced(self.exchange, sums, float(norms.norm()), step)
            norms = self.exchange.total(self._norms(sums).square()).sqrt()
        referee.check_bound(float(norms.norm()), count=count)
        keys = self._earlier(step)
        with self.timed("ledger"):
            keys.append(self._record(sums, step, ledger))
        with self.timed("noise"):
            if frame is not None:
                frame.enter(sums)
            referee.before_noise(sums)
            found = mechanism.privatize(sums, key=keys[-1], earlier=keys[:-1])
            referee.after_noise(
                sums,
                plan=self.plan,
                norms=norms.tolist(),
                draws=[*zip(self._weights[step % self._bands], keys, strict=False)],
                places=number(sums) if self.exchange is None else self.exchange.places(),
            )
            if frame is not None:
                frame.leave(sums)
        # To the end of the block, a draw is part of the noise of later steps.
        if (step + 1) % self._bands == 0:
            self._draws.clear()
        elif self.streams.secure:
            self._draws[step] = keys[-1]
        del keys
        if self.exchange is not None:
            with self.timed("exchange"):
                sums = self.exchange.spread(sums)
        with self.timed("update"):
            self.update(sums)
        referee.begin_step()
        return found

    def _norms(self, sums: Tensors) -> torch.Tensor:
        """The norm of each block of the plan."""
        blocks = ([sums[name] for name in block.parameters] for block in self.plan.blocks)
        return torch.tensor([float(joint_norm(each)) for each in blocks], dtype=torch.float64)

    def _reduced(self, exchange: Exchange, sums: Tensors, norm: float, step: int) -> Tensors:
        """This process's share of the total; refuses shares that are not shares of these sums.

        Inner products with one and the same random vector, of the sums before and of the shares
        after, add up to the same number over all processes. Looked at in the first steps and at
        random. Processes that keep rows of a total have nothing to add up here.
        """
        if self.sharded or not (step < FIRST_STEPS or self.streams.coin(step, EXCHANGE_RATE)):
            return exchange.reduce(sums)
        key = self.streams.key("checks", step, 1)
        before = sketch(sums, key=key)
        shares = exchange.reduce(sums)
        after = sketch(shares, key=key, places=exchange.places())
        found = exchange.total(torch.tensor([before, after, norm], dtype=torch.float64))
        if not abs(float(found[0] - found[1])) <= EXCHANGE_ROOM * float(found[2]):
            raise RefereeError(
                f"step {step}: the total over all processes is not what they put in; nothing was "
                "released: the exchange between them is at fault"
            )
        return shares

    def _record(self, sums: Mapping[str, torch.Tensor], step: int, ledger: Ledger) -> bytes:
        """Write the release down; returns the key of its noise, which is used once."""
        secure = self.streams.secure
        token = secrets.token_hex(16) if secure else self.fingerprinted(sums, ledger.key)
        try:
            entry = ledger.record(step=step, token=token)
        except BudgetExhaustedError:
            self.exhausted = True
            raise
        if self._bands > 1 and entry.attempt:
            raise RefereeError(
                f"step {step} was released before with other sums, and its draw is part of later "
                "noise; nothing was released: go on with the next block"
            )
        return self.streams.key("noise", step, attempt=entry.attempt)

    def _earlier(self, step: int) -> list[bytes]:
        """The keys of the steps of this block of noise before this one."""
        before = range(step - step % self._bands, step)
        if not self.streams.secure:
            return [self.streams.key("noise", each) for each in before]
        if not all(each in self._draws for each in before):
            raise RefereeError(
                f"step {step} goes on with a block of noise whose draws are gone; nothing was "
                "released: begin with the next block"
            )
        return [self._draws[each] for each in before]
