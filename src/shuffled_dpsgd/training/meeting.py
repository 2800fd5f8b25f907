"""What the ranks of a run exchange in every step: parts of the batch, norms, losses, checks.

All ranks draw the same Poisson batch, and with W ranks each takes every W-th record of it. So the
union is the batch that one process would draw, and no record is in two parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import torch

from shuffled_dpsgd.distributed.agreement import comparable, compare
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import RankError
from shuffled_dpsgd.runtime.shards import all_held, any_sharded
from shuffled_dpsgd.training.fingerprints import summary
from shuffled_dpsgd.training.metrics import LossMeter, mean_loss


class Meeting:
    """Divides logical batches among the ranks and gathers what became of the parts.

    Before every release the ranks compare the norms and sums of their weights, to the last bit;
    where the weights lie on several ranks, those of all that `share` them, as last noted. Ranks
    that split every layer are `alike`: each has all records, and should find the same losses.
    """

    def __init__(
        self,
        world: World,
        trainable: Mapping[str, torch.Tensor],
        sharing: World | None = None,
        *,
        alike: bool = False,
    ) -> None:
        self._world = world
        self._alike = alike
        self._sharing = sharing or world
        self._trainable = trainable
        self._is_spread = world.size > 1 and any_sharded(trainable.values())
        self._known = ""
        self._drawn: dict[int, str] = {}
        self.note_weights()

    def note_weights(self) -> None:
        """Take note of the weights as they are; collective where they lie on several ranks."""
        if self._is_spread:
            self._known = _mark(self._sharing.gather_texts(_mark(self._weights())))

    def _weights(self) -> str:
        return summary([part.detach() for part in all_held(self._trainable.values())])

    def part(self, step: int, indices: Sequence[int]) -> tuple[int, ...]:
        """This rank's part of what was drawn for `step`; parts differ by one record at most."""
        if self._world.size == 1:
            return tuple(indices)
        self._drawn[step] = _mark(tuple(indices))
        return tuple(indices if self._alike else indices[self._world.rank :: self._world.size])

    def most_parts(self, indices: Sequence[int], count: Callable[[Sequence[int]], int]) -> int:
        """The largest number of physical batches on any rank; `count` gives it for one part.

        Every rank knows what all ranks draw, so nothing is communicated.
        """
        size = self._world.size
        return max(count(indices[rank::size]) for rank in range(size))

    def hold(
        self, step: int, find_norms: Callable[[], torch.Tensor], losses: LossMeter
    ) -> tuple[torch.Tensor, float | None]:
        """Bring together the norms of all samples of the step, and their mean loss.

        If `find_norms` fails on a rank, it tells the others, so that no rank waits for it.

        Raises:
            RankError: a rank failed, or ranks are not at the same step of the same run.
        """
        if self._world.size == 1:
            return find_norms(), losses.mean()
        try:
            norms, failure = find_norms(), None
        except Exception as error:  # Raised again below, when the others know.
            norms, failure = torch.empty(0), error
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        state = self._known if self._is_spread else _mark(self._weights())
        facts = {"step": step, "logical batch": self._drawn.get(step), "state": state}
        width = norms.element_size() if norms.numel() else 0
        own = (problem, comparable(facts), losses.totals(), norms.numel(), width)
        notes = [json.loads(note) for note in self._world.gather_texts(json.dumps(own))]
        if failure is not None:
            raise failure
        problems, everyone, totals, counts, widths = zip(*notes, strict=True)
        for rank, other in enumerate(problems):
            if other is not None:
                raise RankError(f"step {step} was not taken, because rank {rank} failed: {other}")
        compare(
            everyone,
            remedy="ranks that are not in step cannot release anything together: resume all of "
            "them from one checkpoint",
        )
        self._drawn = {number: mark for number, mark in self._drawn.items() if number > step}
        if self._alike:
            sums = [0.0 if total is None else total[0] for total in totals]
            if max(sums) - min(sums) > 1e-3 * max(map(abs, sums)):
                raise RankError(
                    f"step {step} was not taken: ranks that split layers have other losses for the "
                    "same records. All must draw the same random numbers, in loading them too"
                )
            return norms, losses.mean()
        if max(counts) > 0:
            # Not all ranks need have the same type; a part without a record has any.
            kind = torch.float32 if set(widths) <= {0, 4} else torch.float64
            norms = torch.cat(self._world.gather_vectors(norms.to(kind), counts))
        return norms, mean_loss(totals)


def _mark(fact: object) -> str:
    return hashlib.sha256(repr(fact).encode()).hexdigest()
