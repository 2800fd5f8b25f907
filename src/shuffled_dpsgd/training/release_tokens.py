"""What a release is known by in the ledger, so that a repeated one is not counted twice."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import all_held, any_sharded
from shuffled_dpsgd.training.fingerprints import fingerprint, summary
from shuffled_dpsgd.training.ledger import Ledger
from shuffled_dpsgd.training.randomness import RandomStreams
from shuffled_dpsgd.training.shared_ledger import SharedLedger


class ReleaseTokens:
    """Names the releases of a run.

    In a seeded run the same step from the same weights with the same sums is the same release.
    From other weights or with other sums (changed settings or data, a device that does not repeat
    itself) it is a new one, with noise used before: it is counted. Every bit of the sums counts; of
    the weights a summary does, since equal sums under equal noise are one release wherever they
    start from. With `secure` noise, which is never drawn again, every release is a new one.
    """

    def __init__(
        self,
        *,
        secure: bool,
        streams: RandomStreams,
        world: World,
        trainable: Mapping[str, torch.Tensor],
    ) -> None:
        self._secure = secure
        self._streams = streams
        self._world = world
        self._spread = world.size > 1 and any_sharded(trainable.values())
        self._trainable = trainable
        self._known = ""
        self.note_weights()

    def of_step(
        self,
        step: int,
        ledger: Ledger | SharedLedger,
        sums: Mapping[str, torch.Tensor] | None = None,
    ) -> str:
        """The token of the release of `sums` at `step`; without `sums`, what it begins with."""
        if self._secure:
            return self._streams.token(step)
        key, start = ledger.key, self.summarize_weights()
        shares = [] if sums is None else self._world.gather(fingerprint(sums, key))
        whole = ":".join(shares) if shares else None
        return self._streams.token(step, key=key, start=start, sums=whole)

    def note_weights(self) -> None:
        """Take note of the weights as they are; collective where they lie on several ranks."""
        if self._spread and not self._secure:
            self._known = ":".join(self._world.gather(self._summary()))

    def summarize_weights(self) -> str:
        """The weights' norms and sums, to the last bit; on several ranks, as last noted."""
        return self._known if self._spread else self._summary()

    def _summary(self) -> str:
        return summary([part.detach() for part in all_held(self._trainable.values())])
