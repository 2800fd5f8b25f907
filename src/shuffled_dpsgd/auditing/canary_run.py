"""One training run with canaries in it, and what each threat model reads from its releases.

Gradient canaries join every step with the run's own sampling probability, as records do; input
canaries are records. Each is in the run or not by its own fair coin, drawn before it starts; one
that is left out is never sampled, so that sampling probability and divisor do not depend on coins.
The other records may be left out alike: the data set an adversary would choose, where they have no
gradient and leave the batch clip to the canaries.

Two readings of the gradient canaries. *Along the run* is an attack on the whole run: one score per
canary, from releases alone. The scores depend on each other through the weights, so only coins are
assumed. *Step by step* tests the noise itself: one score for every step that a canary joined, or
would have joined, with the records' own sums taken off. What is left is the canary and the noise
along its direction: directions are orthogonal and the noise of each step is fresh, so these scores
are independent, whatever the weights did. Where that is not so, they are not handed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.alignment import ShuffleFollower, realign
from shuffled_dpsgd.auditing.estimators import Inclusion, ScorePair
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.auditing.input_canaries import Extended, Leaving, losses_of, plant
from shuffled_dpsgd.auditing.taps import OnProgress, Tensors, tap, train, trainable
from shuffled_dpsgd.auditing.target import AuditTarget, RunSetting
from shuffled_dpsgd.auditing.verdict import Evidence, ThreatModel
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import Permutation, apply_to_tensors
from shuffled_dpsgd.training.metrics import Release
from shuffled_dpsgd.training.private import PrivateTraining

WHOLE = 1e-3
"""How far rounding may move a canary's part in the sums, in units of the clip norm."""
STEP_BY_STEP = "noise of every step"
STEP_ASSUMPTIONS = (
    "the noise is Gaussian, of one scale, and independent between steps and coordinates",
    "canaries are orthogonal and whole in every sum (looked at in every step)",
    "every canary joins every step by a coin of its own, at the sampling rate that is accounted",
)


class CanaryField:
    """`count` orthogonal unit vectors on the coordinates of the given tensors, with random signs.

    Coordinates are dealt out like cards: in a random order, the k-th goes to canary k modulo
    `count`. So adding and reading are one gather over the model and a sum over rows, on the
    tensors' own device, and reading is the same on every run.
    """

    def __init__(self, like: Tensors, count: int, rng: np.random.Generator) -> None:
        self._shapes = {name: tensor.shape for name, tensor in like.items()}
        dimension = sum(tensor.numel() for tensor in like.values())
        if not 1 <= count <= dimension // 2:
            raise InvalidArgumentError(
                "count", expected=f"from 1 to {dimension // 2} canaries", got=count
            )
        self.count = count
        device = next(iter(like.values())).device
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**63)))
        self._order = torch.randperm(dimension, generator=generator, device=device)
        signs = torch.randint(2, (dimension,), generator=generator, device=device)
        self._sign = (2 * signs - 1).to(torch.int8)
        shares = dimension // count + (np.arange(count) < dimension % count)
        self._scale = np.asarray(shares**-0.5, dtype=np.float64)

    def sum_of(self, active: NDArray[np.bool_]) -> dict[str, torch.Tensor]:
        """The sum of the active canaries, as tensors of the model's shapes."""
        dealt = torch.from_numpy(active * self._scale).to(self._order.device)
        rounds = -(-self._order.numel() // self.count)
        flat = torch.empty(self._order.numel(), dtype=torch.float64, device=dealt.device)
        flat[self._order] = dealt.repeat(rounds)[: flat.numel()]
        parts = (flat * self._sign).split([shape.numel() for shape in self._shapes.values()])
        return {n: p.reshape(s) for (n, s), p in zip(self._shapes.items(), parts, strict=True)}

    def read(self, tensors: Tensors, only: frozenset[str] | None = None) -> Floats:
        """Inner product of every canary with `tensors`, restricted to `only` if given."""
        device = self._order.device
        parts = [
            tensors[name].detach().to(device, torch.float64).reshape(-1)
            if only is None or name in only
            else torch.zeros(shape.numel(), dtype=torch.float64, device=device)
            for name, shape in self._shapes.items()
        ]
        dealt = (torch.cat(parts) * self._sign)[self._order]
        whole = dealt.numel() // self.count * self.count
        sums = dealt[:whole].reshape(-1, self.count).sum(dim=0)
        sums[: dealt.numel() - whole] += dealt[whole:]
        read: Floats = sums.cpu().numpy() * self._scale
        return read


class CanaryRun:
    """Trains once; `evidence()` afterwards holds one entry per threat model."""

    def __init__(self, target: AuditTarget, setting: RunSetting) -> None:
        self._target, self._rng = target, np.random.default_rng([setting.seed, 4])
        self.input_name = f"{setting.input_canary} input"
        count = setting.num_gradient_canaries
        self.private = private = target.start(target.size + setting.num_input_canaries)
        self._inputs = plant(
            setting.input_canary, target.data, setting.num_input_canaries, self._rng, private.model
        )
        self._inputs_in = self._rng.random(len(self._inputs)) < 0.5
        self._data = Extended(target.data, self._inputs)
        left_out = target.size + np.flatnonzero(~self._inputs_in)
        if not setting.other_records:
            left_out = np.concatenate([np.arange(target.size), left_out])
        self._left_out = left_out
        private.claims.audit_with(sampler=Leaving(private.sampler, left_out))
        plan = private.plan
        self._shuffle = ShuffleFollower(private)
        self._initial = trainable(private.model)
        self._field = CanaryField(self._initial, count, self._rng)
        self.included = self._rng.random(count) < 0.5
        self._joined = np.zeros(count, dtype=bool)
        sigma = plan.smallest_noise_multiplier
        quiet = [block for block in plan.blocks if block.noise_multiplier == sigma]
        self._quiet_blocks = {block.name for block in quiet}
        self._quiet = frozenset(name for block in quiet for name in block.parameters)
        everything = self._field.sum_of(np.ones(count, dtype=bool))
        self._quiet_norms = np.sqrt(self._field.read(everything, self._quiet))
        self._of_records = np.zeros(count)
        self._steps: dict[bool, list[Floats]] = {True: [], False: []}
        self._faults = Counter[str]()
        self.iterate_scores = np.zeros(count)
        self._recorder = tap(private, self._injected)

    def train(self, on_progress: OnProgress | None = None) -> None:
        """To the end of the plan, then release."""
        train(
            self.private,
            self._data,
            self._target.losses,
            self._target.collate,
            watch=self._observe,
            on_progress=on_progress,
        )
        self.private.release()

    def evidence(self) -> list[Evidence]:
        """What every threat model reads: of each canary, and of each step it took part in."""
        final = trainable(self.private.model)
        spec = self.private.spec
        moved = frozenset() if spec is None else spec.moved_names
        unmoved = frozenset(final) - moved
        aligned = final if spec is None else realign(spec, self._initial, final).tensors
        displacement = {n: self._initial[n] - aligned[n] for n in final}
        found = [] if self.why_not_step_by_step else [self._step_by_step()]
        found += [
            self._guessed(
                "re-alignment along the run", ThreatModel.STEP_GRADIENTS, self.iterate_scores
            ),
            self._guessed(
                "re-alignment against W_0",
                ThreatModel.FINAL_WITH_INITIAL,
                self._field.read(displacement),
            ),
        ]
        if unmoved:
            read = -self._field.read(final, only=unmoved)
            threat = ThreatModel.FINAL_WITHOUT_INITIAL
            found.append(self._guessed("un-permuted tensors", threat, read))
        if len(self._inputs) > 1:
            found.append(
                Evidence(
                    adversary="loss threshold",
                    canary=self.input_name,
                    threat_model=ThreatModel.BLACK_BOX,
                    scores=self.queried(self.private),
                )
            )
        return found

    def _guessed(self, name: str, threat: ThreatModel, scores: Floats) -> Evidence:
        return Evidence(
            adversary=name,
            canary="gradient",
            threat_model=threat,
            scores=Inclusion(scores=scores, included=self.included),
        )

    def _step_by_step(self) -> Evidence:
        out, present = (np.concatenate(self._steps[included]) for included in (False, True))
        return Evidence(
            adversary=STEP_BY_STEP,
            canary="gradient",
            threat_model=ThreatModel.MECHANISM_OUTPUT,
            scores=ScorePair(out=out, present=present),
            assumptions=STEP_ASSUMPTIONS,
        )

    @property
    def why_not_step_by_step(self) -> tuple[str, ...]:
        """What keeps the scores of single steps from being independent; empty if nothing does."""
        steps = self.private.steps_taken
        reasons = [f"{fault} in {count} of {steps} steps" for fault, count in self._faults.items()]
        reasons += self.private.plan.uncertifiable
        if not self._quiet_norms.all():
            reasons.append("some canaries lie outside the tensors with the least noise")
        sizes = [sum(map(len, self._steps[included])) for included in (False, True)]
        if min(sizes) < 2:
            reasons.append(f"canaries took part {sizes[1]} times, and {sizes[0]} times as controls")
        return tuple(reasons)

    def queried(self, private: PrivateTraining) -> Inclusion:
        """The loss of every input canary under the model of a run, negated, and who was in."""
        collate = self._target.collate or default_collate
        losses = losses_of(private, self._inputs, self._target.losses, collate)
        return Inclusion(scores=-losses, included=self._inputs_in)

    def queried_after(self, start: Callable[[int], PrivateTraining]) -> Inclusion:
        """The same after another run on the same records, with the same canaries left out."""
        other = start(len(self._data))
        other.claims.audit_with(sampler=Leaving(other.sampler, self._left_out))
        train(other, self._data, self._target.losses, self._target.collate)
        other.release()
        found = self.queried(other)
        other.close()
        return found

    @property
    def recovered(self) -> float:
        """Share of the permuted positions that the adversary knows the place of by now."""
        return self._shuffle.recovered

    def notes(self) -> tuple[str, ...]:
        """How well the adversary followed the shuffle, and why steps could not be read singly."""
        whole = "every canary stands for a unit, all of its records together"
        found = [whole] if self.private.plan.records_per_unit else []
        if self._shuffle.true is not None:
            share = f"{self.recovered:.1%}"
            found.append(f"re-alignment along the run recovered {share} of the permuted positions")
        if self.why_not_step_by_step:
            reasons = "; ".join(self.why_not_step_by_step)
            found.append(
                f"{STEP_BY_STEP}: not read, its scores would not be independent: {reasons}"
            )
        return tuple(found)

    def _injected(self, records: Tensors) -> dict[str, torch.Tensor]:
        """The clipped gradients of the canaries drawn for this step, in the current frame."""
        plan = self.private.plan
        self._joined = self._rng.random(self._field.count) < plan.sampling_prob
        self._of_records = self._read(records, self._shuffle.true)
        sums = self._field.sum_of(self._joined & self.included)
        sums = {name: plan.clip_norm * t.to(self.private.device) for name, t in sums.items()}
        if self._shuffle.true is not None:
            apply_to_tensors(self._shuffle.true, sums)
        return sums

    def _read(self, sums: Tensors, frame: Permutation | None) -> Floats:
        """Inner products of sums with the canaries, moved as `frame` says, over the clip norm.

        In the tensors with the least noise, which most or all of every canary lies in.
        """
        moved = {name: tensor.clone() for name, tensor in sums.items()}
        if frame is not None:
            apply_to_tensors(frame.inverse(), moved)
        return self._field.read(moved, self._quiet) / self.private.plan.clip_norm

    def _observe(self) -> None:
        """After an update: read the release, then follow the shuffle to the next one."""
        scale = self.private.plan.expected_batch_size
        released = {name: tensor * scale for name, tensor in self._recorder.last.items()}
        read = self._read(released, self._shuffle.found)
        self.iterate_scores += self._log_ratios(read)
        self._read_step(read)
        self._shuffle.follow()

    def _read_step(self, read: Floats) -> None:
        """One score for every canary drawn for this step; notes what would make them dependent."""
        given = self._read(self._recorder.given, self._shuffle.found) - self._of_records
        expected = self._quiet_norms**2 * (self._joined & self.included)
        record = Release.of(self.private.plan, self._recorder.norms)
        quiet = [b for b in record.blocks if b.name in self._quiet_blocks]
        faults = {
            "the shuffle was not followed": self.recovered < 1.0,
            "a canary was not whole in the sums": np.abs(given - expected).max() > WHOLE,
            "the batch clip shrank the sums": any(b.batch_clip_factor < 1.0 for b in quiet),
        }
        self._faults.update(fault for fault, found in faults.items() if found)
        scores = (read - self._of_records) / np.maximum(self._quiet_norms, 1e-12)
        for included, found_scores in self._steps.items():
            found_scores.append(scores[self._joined & (self.included == included)])

    def _log_ratios(self, found: Floats) -> Floats:
        """How much likelier the step is with each canary sampled into it than without it.

        As if the batch clip let the canary through whole.
        """
        sigma, rate = self.private.plan.smallest_noise_multiplier, self.private.plan.sampling_prob
        if not 0.0 < rate < 1.0 or sigma == 0.0:
            return found
        exponents = (found - 0.5) / sigma**2 + np.log(rate)
        return np.asarray(np.logaddexp(np.log1p(-rate), exponents), dtype=np.float64)
