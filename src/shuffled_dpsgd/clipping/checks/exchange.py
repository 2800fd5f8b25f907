"""The neighbour test: exchange some records of a batch, and nothing of the others may move.

Whatever computes with a batch (a model, a loss, what collates it) is run twice under the same
random numbers, the second time with about half of its records exchanged for others. What the rest
of them give, values and gradients, must stay where it is. So whatever makes records meet is seen,
be it random or not, without a word about how they meet. Where nothing is drawn at random, the rest
is also run alone and in another order: its values may not depend on how many others there are.

Where numbers are drawn for more than dropout, records that meet in one batch of ten need not have
met in this one. Then the values are compared under many other random numbers as well.

Where one number is all that comes out for the batch, the rest is exchanged too: with the others as
they are and with the others exchanged, the number must change by the same amount.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shuffled_dpsgd.errors import CannotReplayError
from shuffled_dpsgd.runtime.random_states import OperationsNoted, RandomStates, seed_all
from shuffled_dpsgd.runtime.replay import Observed

# Looks at the first batch, and at later kinds. What happens in one batch of ten is missed by 48
# looks with probability 0.6 %.
FIRST_LOOKS, MORE_LOOKS = 48, 8
# Before the first release, where nothing but dropout is drawn: other records and masks, and batches
# as large as they come, for what seldom makes a difference or in large ones alone.
_FEW_LOOKS = 4
# Records that are watched together.
_MOST_KEPT = 16
# Relative to the length of what is compared; wider than what rounding does.
_TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 2e-3,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
}
# A sum that cancels is compared with what the samples themselves would make.
_CANCELLED = 0.1

_AMONG_OTHERS = "once other records are exchanged, under the same random numbers"

Run = Callable[[Sequence[int], Sequence[int], bool], Observed]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What moved: the parameter whose gradient did most, if it was a gradient, and how far."""

    name: str
    got: str


class ExchangeTest:
    """Compares what some records of a batch give among others; `draws` is where choices come from.

    `num_watched` says how many records the latest test watched.
    """

    def __init__(self, model: nn.Module, draws: random.Random) -> None:
        self.num_watched = 0
        self._model = model
        self._draws = draws
        self._is_first = True

    def find_change(
        self,
        run: Run,
        rows: int,
        *,
        sources: Sequence[int],
        states: RandomStates,
        tolerance: float,
        typical: float = 0.0,
        is_new: bool = True,
        up_to: int = 0,
        gradients: bool = True,
    ) -> Moved | None:
        """What of the watched records moves, if anything, in a batch of `rows` records.

        `run(order, kept, gradients)` gives what the records at the `kept` places have when the
        batch has its records in this order. Records are watched and exchanged out of `sources`.
        `typical` is the length of a sample's gradient. A batch of a kind that `is_new` is looked at
        more often, and so is any before the first release, when batches of `up_to` rows are tried.
        """
        noted = OperationsNoted(rows)

        def allowed() -> float:
            return max(tolerance, *(_TOLERANCES.get(kind, 0.0) for kind in noted.dtypes))

        trial = _Trial(run, rows, sources, self._draws, allowed, typical)
        self.num_watched = len(trial.kept)
        with noted:
            found = trial.exchange(states, gradients)
        host_moved = states.of_others() != states.again().of_others()
        is_random = states.plain() != states.again().plain()
        if found is None and not is_random:
            found = trial.leave_out(gradients)
        if found is None:
            looks = _FEW_LOOKS if up_to else 0
            if (is_new or up_to) and (noted.besides_dropout or host_moved):
                looks = FIRST_LOOKS if self._is_first else MORE_LOOKS
                self._is_first = False
            for _ in range(looks):
                seed_all(self._draws.getrandbits(32))
                trial = _Trial(run, max(rows, up_to), sources, self._draws, allowed, typical)
                found = trial.exchange(RandomStates.of_model(self._model), False)
                if found is not None:
                    break
        return found


class _Trial:
    """One choice of watched records and of others in the place of the rest."""

    def __init__(
        self,
        run: Run,
        rows: int,
        sources: Sequence[int],
        draws: random.Random,
        tolerance: Callable[[], float],
        typical: float,
    ) -> None:
        count = min(_MOST_KEPT, max(1, len(sources) // 2))
        self.kept = sorted(draws.sample(sources, count))
        self._run = run
        self._draws = draws
        self._sources = sources
        self._tolerance = tolerance
        self._floor = _CANCELLED * typical * count**0.5
        # Records that cannot be compared, as those without a finite gradient, are left out.
        known = set(sources)
        self._plain = [row if row in known else self.kept[0] for row in range(rows)]
        self.seen: Observed | None = None

    def exchange(self, states: RandomStates, gradients: bool) -> Moved | None:
        """What moves once the others are exchanged, under the random numbers of `states`."""

        def at(order: list[int]) -> Observed:
            states.restore()
            return self._run(order, self.kept, gradients)

        one = self.seen = at(self._plain)
        orders = [self._others(), self._plain[1:] + self._plain[:1]]
        for row in self.kept:
            orders[1][row] = row
        two, others = _first_that_runs(at, orders)
        if any(value.dim() == 0 for value in one.values):
            swapped = {row: self._another(row) for row in self.kept}
            ends = [
                at([swapped.get(row, source) for row, source in enumerate(order)])
                for order in (self._plain, others)
            ]
            lengths = _length(one.grads.values()), max(float(v.abs().max()) for v in one.values)
            one, two = (_minus(a, b) for a, b in zip((one, two), ends, strict=True))
            return self._apart(one, two, *lengths)
        return self._apart(one, two)

    def leave_out(self, gradients: bool) -> Moved | None:
        """What moves once the others are left out, and the rest stand in another order."""
        assert self.seen is not None, "what the batch as a whole gave"
        order = self._draws.sample(self.kept, len(self.kept))
        if any(value.dim() == 0 for value in self.seen.values) or len(self._plain) == 1:
            return None
        places = [order.index(row) for row in self.kept]
        try:
            alone = self._run(order, places, gradients)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, CannotReplayError):
            return None  # A model may take batches of one size only.
        return self._apart(self.seen, alone, slack=2.0)

    def _others(self) -> list[int]:
        return [
            row if row in self.kept else self._another(row) for row, _ in enumerate(self._plain)
        ]

    def _another(self, row: int) -> int:
        return self._draws.choice([each for each in self._sources if each != row] or [row])

    def _apart(
        self,
        one: Observed,
        two: Observed,
        least_gradient: float = 0.0,
        least_value: float = 0.0,
        slack: float = 1.0,
    ) -> Moved | None:
        tolerance = slack * self._tolerance()
        for a, b in zip(one.values, two.values, strict=True):
            a, b = (torch.nan_to_num(value.double()) for value in (a, b))
            if a.dim():
                a, b = a.flatten(1), b.flatten(1)
            sizes = torch.linalg.vector_norm(torch.atleast_2d(a), dim=-1)
            gaps = torch.linalg.vector_norm(torch.atleast_2d(a - b), dim=-1)
            if not bool((gaps <= tolerance * max(float(sizes.max()), least_value) + 1e-12).all()):
                share = float(gaps.max()) / max(float(sizes.max()), 1e-30)
                return Moved(name="", got=f"a value that is {share:.1%} away {_AMONG_OTHERS}")
        gaps_by_name = _minus(one, two).grads
        whole = max(_length(one.grads.values()), _length(two.grads.values()))
        distance = _length(gaps_by_name.values())
        if distance <= tolerance * max(whole, self._floor, least_gradient) + 1e-12:
            return None
        worst = max(gaps_by_name, key=lambda name: _length([gaps_by_name[name]]))
        share = distance / max(whole, 1e-30)
        return Moved(
            name=worst, got=f"a gradient of {worst} that is {share:.1%} away {_AMONG_OTHERS}"
        )


def tolerance_for(model: nn.Module) -> float:
    """What rounding explains between two runs of one shape, unless they compute in less."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    device = next(model.parameters()).device
    lower = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return max(2e-2 if lower else _TOLERANCES.get(kind, 2e-2) for kind in dtypes)


def _first_that_runs(
    at: Callable[[list[int]], Observed], orders: Sequence[list[int]]
) -> tuple[Observed, list[int]]:
    """What the model gives for the batch in the first order that it can run, and that order."""
    for order in orders[:-1]:
        try:
            return at(order), order
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
    return at(orders[-1]), orders[-1]


def _minus(one: Observed, two: Observed) -> Observed:
    """The difference; gradients that are missing are zero."""
    grads = {name: grad.double() for name, grad in one.grads.items()}
    for name, grad in two.grads.items():
        grads[name] = grads[name] - grad if name in grads else -grad.double()
    values = [a.double() - b.double() for a, b in zip(one.values, two.values, strict=True)]
    return Observed(values=values, grads=grads)


def _length(tensors: Iterable[torch.Tensor]) -> float:
    """The length of tensors taken together; the host waits once."""
    norms = torch._foreach_norm([tensor.double() for tensor in tensors] or [torch.zeros(1)])
    return float(torch.stack([norm.cpu() for norm in norms]).norm())
