"""The referee at the door: nothing is released before it was looked at.

Whatever is fast (engines, kernels, compilers, exchanges) is on probation. A fault in it would give
wrong sums under a card that says proven, so the sums are compared with the definition as they come.

At every release: the sums are finite, there are as many contributions as records were drawn, and
‖sum‖ ≤ count · clip_norm, as holds for every clipped sum. Random coordinates of the release are
recomputed from the plan and the keys by the definition (`noise.normal`).

In the first steps, for every new kind of batch, and at random: the whole sum, at its real shape and
precision, against one stock backward of Σ f_i·loss_i, with the referee's own factors
f_i = min(1, C / norm_i); and the norms of a few samples against their gradients by plain autograd.

A disagreement stops the run before the ledger is written and names the parameter. A comparison that
could not be made is not counted as made, and is made for a later batch instead.

How far two right sums may be apart depends on the precision. Measured on a small BERT, relative to
the sum: 7e-7 in float32, 5e-3 under bfloat16 autocast, of which at most 4e-3 along the sum itself.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.core.clip import ClippedSums, PlainClipping, clip_factor, joint_norm
from shuffled_dpsgd.core.noise import Place, normal
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import CannotReplayError, RefereeError

DEFAULT_RATE = 1 / 256
# Steps with records in them whose sums are always compared. Faults that carry something over from
# an earlier batch show from the second on.
FIRST_STEPS = 3
# Comparisons that cannot be made are tried so often, and from then on at random.
MOST_TRIES = 8
SAMPLES = 2
NOISE_COORDINATES = 4
# On an accelerator, where each look waits for it: always at first, then one release in so many.
FIRST_NOISES, NOISE_TURNS = 8, 16
# Rounding of a bound that is exact on paper, and room that engines leave when they round norms up.
BOUND_ROOM = 1e-3
NORM_ROOM = 0.03
# Of float32 noise near zero, where its radius is coarse, in units of the standard deviation.
NOISE_ROOM = 1e-3
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
TF32_TOLERANCE, HALF_TOLERANCE = 1e-2, 2e-2
# Under half precision errors of single samples cancel along the sum, where a lost sample shows.
ALONG_TOLERANCE = 1e-2


@dataclass(kw_only=True)
class Checks:
    """What was looked at so far; part of the card.

    Comparisons that a new kind of batch gave rise to are not counted: how many there are depends on
    the lengths of the records.
    """

    releases: int = 0
    sums: int = 0
    norms: int = 0
    noise: int = 0
    not_made: int = 0
    reasons: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class _Pending:
    """A batch whose forward has begun: it is compared once its backward is over."""

    kind: Hashable
    rows: int | None
    num_norms: int
    sums: dict[str, Tensor] | None


class SecondRun(Protocol):
    """A batch run once more, by nothing but the model and autograd.

    `has_numbers` says that the loss came out of the model as one number for the whole batch.
    """

    @property
    def has_numbers(self) -> bool: ...

    def gradient(self, weights: Tensor, *, last: bool = False) -> dict[str, Tensor]:
        """The gradient of Σ weights_i·loss_i; `last` lets go of the forward."""

    def cancels(self) -> bool:
        """Whether the gradient of all samples is a small rest of much larger terms."""


Tensors = dict[str, Tensor]
Pull = Callable[[list[Tensor], list[Tensor]], dict[str, Tensor]]


class BatchWitness(Protocol):
    """Keeps the latest call of the model whenever the referee `wants` it.

    A call says whether it was cast (`autocast`) and why it cannot be repeated (`problem`). A wrong
    witness can raise a false alarm or none at all. It cannot make two different sums equal, so it
    is handed in, and nothing is counted as compared that it did not deliver.
    """

    call: Any
    wants: list[Callable[[Any, Mapping[str, Any]], bool]]

    def replay(
        self, call: Any, rows: int, lifted: Any, pull: Pull | None = None
    ) -> AbstractContextManager[SecondRun]: ...


class Shards(Protocol):
    """The processes that a model's rows are spread over; every call is collective."""

    @property
    def computed_in(self) -> frozenset[torch.dtype]:
        """The types that weights are gathered in."""

    def coin(self) -> bool:
        """Whether the step that begins is compared: the same for all."""

    def rows(self, outputs: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
        """This process's rows of the gradients, summed over all processes."""

    def over_all(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The engine's rows, summed over processes that hold copies of them."""

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""


class Referee:
    """Compares what the engine delivers for `model` with the definition.

    `rate` is the share of steps compared at random; one compares every step. `rows` says how many
    rows the next batch has, those that only pad it included, or None if all of them count. With
    `shards`, the engine has this process's rows of sums over all processes. What comes back from
    the loss must be multiplied by `scale`. `may_check` says whether there is time for a comparison
    at random, up to the default rate; what comparisons take is `timed`. Without a `door` there are
    no steps: batches of new kinds are compared, and others at random.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: ClippedSums,
        *,
        clip_norm: float,
        clip: str = "flat",
        groups: Callable[[], list[list[str]]] | None = None,
        rate: float = DEFAULT_RATE,
        scale: Callable[[], float] = lambda: 1.0,
        shards: Shards | None = None,
        rows: Callable[[], int | None] = lambda: None,
        may_check: Callable[[], bool] = lambda: True,
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
        door: bool = True,
    ) -> None:
        self.checks = Checks()
        self.witness: BatchWitness | None = None
        self._model = model
        self._engine = engine
        self._bound = clip_norm if clip != "none" else math.inf
        self._clip = clip if math.isfinite(clip_norm) else "none"
        self._groups = groups
        self._rate = rate
        self._scale = scale
        self._has_door = door
        self._shards = shards
        self._rows = rows
        self._coin = random.SystemRandom()
        self._steps_compared = 0
        self._kinds: set[Hashable] = set()
        self._failed: Counter[Hashable] = Counter()
        self._pending: _Pending | None = None
        self._may_check = may_check
        self._timed = timed
        self._noise: list[tuple[str, int, Tensor]] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Whatever was accumulated is gone; the next batch begins a step."""
        self._compares: bool | None = None
        self._total: dict[str, Tensor] | None = {}
        self._num_compared = 0
        self._half = False
        self._single: dict[str, float] = {}
        self._new_kinds: set[Hashable] = set()
        self._pending = None

    def wants(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether the batch that is about to run is going to be compared."""
        self.settle()
        chosen = self._compares
        if chosen is None:
            first = self._steps_compared < FIRST_STEPS and self.checks.not_made < MOST_TRIES
            by_chance = self._coin.random() < self._rate
            by_chance = by_chance and (self._rate > DEFAULT_RATE or self._may_check())
            if self._shards is not None:
                by_chance = self._shards.coin()
            chosen = by_chance or (first and self._has_door)
            self._compares = chosen if self._has_door else None
        rows = self._rows()
        kind = _kind_of(self._model, args, kwargs)
        is_known = kind in self._kinds or self._failed[kind] >= MOST_TRIES
        if not chosen and (is_known or self._shards is not None):
            return False
        sums = None
        if not self._compares:
            sums = {name: total.clone() for name, total in self._engine.clipped_sum().items()}
        num_norms = self._engine.sample_norms.numel()
        self._pending = _Pending(kind=kind, rows=rows, num_norms=num_norms, sums=sums)
        return True

    @property
    def is_pending(self) -> bool:
        """Whether a batch has run that is going to be compared."""
        return self._pending is not None

    def settle(self) -> None:
        """Compare the batch that is pending, if its backward is over."""
        pending, self._pending, witness = self._pending, None, self.witness
        if pending is None or witness is None or witness.call is None:
            return
        call = witness.call
        norms = self._engine.sample_norms[pending.num_norms :].double().cpu()
        if not norms.numel() and self._shards is None:
            return
        self._half = self._half or call.autocast[1]
        rows = norms.numel() if pending.rows is None else pending.rows
        pull = None if self._shards is None else self._shards.rows
        try:
            self._refuse_to_replay(call, norms)
            lifted = self._engine.lifted()
            with self._timed(), witness.replay(call, rows, lifted, pull) as replay:
                total, lengths = self._expected(replay, norms, rows)
                try:
                    self._weigh(pending, norms, total, lengths)
                except RefereeError as error:
                    if replay.cancels():
                        raise CannotReplayError("gradients are all rounding") from None
                    if self._compares:
                        raise
                    try:
                        # A backward that its author has changed need not be linear in the losses.
                        self._weigh(pending, norms, *self._one_by_one(replay, norms, rows))
                    except RefereeError:
                        raise error from None
        except CannotReplayError as reason:
            self.checks.not_made += pending.sums is not None
            self.checks.reasons.add(str(reason))
            self._failed[pending.kind] += 1
            self._total = None

    def _weigh(
        self, pending: _Pending, norms: Tensor, total: Tensors, lengths: Mapping[int, float]
    ) -> None:
        """Compare one batch, or add it to what its step is going to be compared with."""
        if pending.sums is not None:
            found = self._engine.clipped_sum()
            delivered = {name: found[name] - before for name, before in pending.sums.items()}
            self._compare(delivered, total, norms)
            self._kinds.add(pending.kind)
        elif self._total is not None:
            self._num_compared += norms.numel()
            self._new_kinds.add(pending.kind)
            for name, part in total.items():
                self._total[name] = part if name not in self._total else self._total[name] + part
        self._check_norms(norms, lengths)

    def _refuse_to_replay(self, call: Any, norms: Tensor) -> None:
        """Where processes run the model together, all of them do or none does."""
        problem = None if torch.isfinite(norms).all() else "a sample's gradient is not finite"
        problem = problem or call.problem()
        is_any = problem is not None if self._shards is None else self._shards.is_any(bool(problem))
        if is_any:
            raise CannotReplayError(problem or "another process could not run its batch once more")

    def _expected(
        self, replay: SecondRun, norms: Tensor, rows: int
    ) -> tuple[Tensors, dict[int, float]]:
        """The clipped sum of one batch by plain autograd, and the norms of a few samples."""
        scale = 1.0 if replay.has_numbers else self._scale()
        if self._clip == "per-layer":
            return self._one_by_one(replay, norms, rows)
        # Rows of a gradient summed over processes say nothing of a single sample.
        watched = 0 if self._shards is not None else min(SAMPLES, len(norms))
        lengths = {}
        for sample in self._coin.sample(range(len(norms)), watched):
            weights = torch.zeros(rows, dtype=torch.float64)
            weights[sample] = scale
            grads = replay.gradient(weights)
            lengths[sample] = float(joint_norm(grads.values()))
            factor = clip_factor(lengths[sample], self._bound, self._clip)
            for name, grad in grads.items():
                own = factor * float(joint_norm([grad]))
                self._single[name] = max(own, self._single.get(name, 0.0))
        weights = torch.zeros(rows, dtype=torch.float64)
        factors = [clip_factor(norm, self._bound, self._clip) for norm in norms.tolist()]
        weights[: len(norms)] = torch.tensor(factors, dtype=torch.float64) * scale
        found = replay.gradient(weights, last=True)
        return {n: g if g.dtype == torch.float64 else g.float() for n, g in found.items()}, lengths

    def _one_by_one(
        self, replay: SecondRun, norms: Tensor, rows: int
    ) -> tuple[Tensors, dict[int, float]]:
        """The same with every sample by itself: groups of parameters have factors of their own."""
        groups = None if self._groups is None else self._groups()
        plain = PlainClipping(self._model, clip_norm=self._bound, clip=self._clip, groups=groups)
        for sample in range(len(norms)):
            weights = torch.zeros(rows, dtype=torch.float64)
            weights[sample] = 1.0 if replay.has_numbers else self._scale()
            plain.add_gradient(replay.gradient(weights))
        return plain.clipped_sum(), dict(enumerate(plain.sample_norms.tolist()))

    def _check_norms(self, norms: Tensor, lengths: Mapping[int, float]) -> None:
        tolerance = max(self._tolerance(), 2e-3)
        # Gradients far below their batch's typical one are all rounding.
        slack = 1e-3 * float(norms.median()) if len(norms) else 0.0
        for sample, expected in lengths.items():
            found = float(norms[sample])
            low, high = (1 - tolerance) * expected, (1 + tolerance + NORM_ROOM) * expected
            if not low - slack <= found <= high + slack:
                raise RefereeError(
                    f"sample {sample} of a batch: a norm of {found:.6g}, where plain autograd "
                    f"finds {expected:.6g}; nothing was released: {_REMEDY}"
                )
            self.checks.norms += bool(self._compares)

    def inspect(
        self, sums: Mapping[str, Tensor], *, norm: float | None, count: int, drawn: int
    ) -> None:
        """Refuse sums that are not the clipped sums of the records drawn.

        Without a `norm` they are one process's rows of a total over several, and have no bound of
        their own.
        """
        self.settle()
        if count != drawn:
            raise RefereeError(
                f"{drawn} records were drawn and {count} are in the sums; nothing was released"
            )
        if norm is not None:
            self.check_bound(norm, count=count)
        if self._compares and self._shards is None and count:
            self._conclude(sums, self._whole_total(count))

    def inspect_rows(self, sums: Mapping[str, Tensor]) -> None:
        """As `inspect`, for rows of a total over all processes; collective."""
        if self._shards is None or not self._compares:
            return
        total = self._whole_total(self._engine.sample_norms.numel())
        error: RefereeError | None = None
        try:
            sums = self._shards.over_all(sums)
            self._conclude(sums, None if self._shards.is_any(total is None) else total)
        except RefereeError as found:
            error = found
        if self._shards.is_any(error is not None):
            raise error or RefereeError(
                "the sums of another process are wrong; nothing was released"
            )

    def _whole_total(self, count: int) -> dict[str, Tensor] | None:
        """What plain autograd found for all records of the step, if it could be run for all."""
        return self._total if self._num_compared == count else None

    def _conclude(self, sums: Mapping[str, Tensor], total: Mapping[str, Tensor] | None) -> None:
        if total is None:
            self.checks.not_made += 1
            if not self.checks.reasons:
                self.checks.reasons.add("the model was not called in a way that could be followed")
            return
        self._compare(sums, total, self._engine.sample_norms.double().cpu())
        self._kinds |= self._new_kinds
        self._steps_compared += 1
        self.checks.sums += 1

    def check_bound(self, norm: float, *, count: int) -> None:
        """‖sum‖ ≤ count · clip_norm, as for every clipped sum; of no record it is zero."""
        most = count * self._bound * (1 + BOUND_ROOM) if count else 0.0
        if not norm <= most or not math.isfinite(norm):
            raise RefereeError(
                f"a sum of norm {norm:.6g} over {count} records clipped to {self._bound:g}, which "
                f"no clipped sum can have; nothing was released: {_REMEDY}"
            )

    def _compare(
        self,
        found: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        norms: Tensor,
    ) -> None:
        """Refuse a sum that differs from the definition's by more than rounding."""
        tolerance = self._tolerance()
        clipped = [n * clip_factor(n, self._bound, self._clip) for n in norms.tolist()]
        apart = {name: found[name] - expected[name].to(found[name]) for name in expected}
        lengths = {name: float(joint_norm([part])) for name, part in apart.items()}
        whole = float(joint_norm(expected.values()))
        # Errors of single samples add up even where the samples themselves cancel.
        scale = max(whole, math.hypot(*clipped))
        distance = math.hypot(*lengths.values())
        worst = max(lengths, key=lambda name: lengths[name])
        along = sum(float((apart[n] * expected[n].to(apart[n])).sum()) for n in expected)
        wrong = {worst} if not distance <= tolerance * scale else set()
        if tolerance == HALF_TOLERANCE and abs(along) > ALONG_TOLERANCE * whole * scale:
            wrong.add(worst)
        for name, part in expected.items():
            # Single tensors round worse than the whole. Where samples cancel, what is left of them
            # is rounding: of what single samples were seen to contribute, or else of the whole.
            own = 7.5 * float(joint_norm([part])) + scale / 40
            single = self._single.get(name)
            own += scale / 4 if single is None else 2 * single * math.sqrt(len(clipped))
            if not lengths[name] <= tolerance * own:
                wrong.add(name)
        if wrong:
            name = max(wrong, key=lambda name: lengths[name])
            raise RefereeError(
                f"{name}: the sum of clipped gradients is {lengths[name] / scale:.2%} of its norm "
                f"away from what plain autograd finds ({distance / scale:.2%} over all "
                f"parameters); nothing was released: {_REMEDY}",
                name=name,
            )

    def before_noise(self, sums: Mapping[str, Tensor]) -> None:
        """Keep a few coordinates as they are before the mechanism."""
        self._noise = []
        self.checks.releases += 1
        on_host = all(tensor.device.type == "cpu" for tensor in sums.values())
        often = on_host or self.checks.releases <= FIRST_NOISES or self._compares
        if not often and self._coin.randrange(NOISE_TURNS):
            return
        names = [name for name, tensor in sums.items() if tensor.numel()]
        sizes = [sums[name].numel() for name in names]
        chosen = self._coin.choices(names, sizes, k=NOISE_COORDINATES) if names else []
        if self._compares:
            # Every tensor, where the step is looked at closely anyway.
            chosen += names
        for name in chosen:
            at = self._coin.randrange(sums[name].numel())
            self._noise.append((name, at, sums[name].view(-1)[at].clone()))

    def after_noise(
        self,
        sums: Mapping[str, Tensor],
        *,
        plan: PrivacyPlan,
        norms: Sequence[float],
        draws: Sequence[tuple[float, bytes]],
        places: Mapping[str, Place],
    ) -> None:
        """Recompute those coordinates by the definition, from the plan and the keys alone.

        `norms` are those of the plan's blocks, and `draws` the keys with their weights.
        """
        blocks = zip(plan.blocks, norms, strict=True)
        known = {name: (block, norm) for block, norm in blocks for name in block.parameters}
        for name, at, before in self._noise:
            block, norm = known[name]
            std, bound = block.noise_std(plan.clip_norm), block.batch_clip_norm
            group, first = places[name]
            wide = sums[name].dtype == torch.float64
            place = Place(group, first + at)
            noise = std * sum(w * normal(key, place, wide=wide) for w, key in draws)
            value, found = float(before), float(sums[name].view(-1)[at]) * plan.expected_batch_size
            value *= 1.0 if bound is None or norm <= bound else bound / norm
            rounding = (1e-12 if wide else 1e-6) * (abs(value) + abs(found))
            if not abs(found - value - noise) <= NOISE_ROOM * std + rounding:
                raise RefereeError(
                    f"{name}: coordinate {at} received noise of {found - value:.6g}, and plan and "
                    f"keys give {noise:.6g}; nothing was released: {_REMEDY}"
                )
            self.checks.noise += 1
        self._noise = []

    def _tolerance(self) -> float:
        dtypes = {p.dtype for p in self._model.parameters() if p.requires_grad}
        computed = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        computed |= frozenset() if self._shards is None else self._shards.computed_in
        if self._half or computed & {torch.float16, torch.bfloat16}:
            return HALF_TOLERANCE
        device = next(self._model.parameters()).device.type
        if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            return TF32_TOLERANCE
        return max(TOLERANCES.get(dtype, HALF_TOLERANCE) for dtype in dtypes)


_REMEDY = (
    "a kernel, the compiler or the hardware gives wrong numbers, or the model computes something "
    "else each time it is run. Try strategy='instantiate', without torch.compile, and report it"
)


def _kind_of(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    """Batches that should take the same path: types, axes, and sizes to a factor of two."""
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    shapes = tuple((t.dtype, *(length.bit_length() for length in t.shape)) for t in tensors)
    device = next(model.parameters()).device.type
    return shapes, model.training, torch.is_autocast_enabled(device)
