"""One training run with canaries in it, and what each threat model reads from its releases.

Gradient canaries join every step with the run's own sampling probability, as records do; input
canaries are records. Each is in the run or not by its own fair coin, drawn before it starts; one
that is left out is never sampled, so that sampling probability and divisor do not depend on coins.
The other records may be left out alike: the data set an adversary would choose, where they have no
gradient and leave the batch clip to the canaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.adversaries import ThreatModel
from shuffled_dpsgd.auditing.alignment import realign
from shuffled_dpsgd.auditing.estimators import Inclusion
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.auditing.gradient_canaries import CanaryField, InjectingEngine, Tensors
from shuffled_dpsgd.auditing.input_canaries import (
    Extended,
    InputCanary,
    Leaving,
    losses_of,
    plant,
)
from shuffled_dpsgd.auditing.probes import OnProgress, trainable
from shuffled_dpsgd.auditing.sensitivity import RecordingMechanism
from shuffled_dpsgd.auditing.unwatched import Unwatched
from shuffled_dpsgd.auditing.verdict import Evidence
from shuffled_dpsgd.auditing.watched_training import train_watched
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import Permutation, apply_to_tensors, draw, identity
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining


class CanaryRun:
    """Trains once; `evidence()` afterwards holds one entry per threat model."""

    def __init__(
        self,
        *,
        start: Callable[[int], PrivateTraining],
        data: MapStyle,
        losses: PerSampleLoss,
        collate: Callable[[list[Any]], Any] | None,
        num_gradient_canaries: int,
        num_input_canaries: int,
        input_canary: InputCanary,
        seed: int,
        other_records: bool = True,
    ) -> None:
        self._rng = np.random.default_rng([seed, 4])
        self._losses, self._collate = losses, collate or default_collate
        self._input_name = f"{input_canary} input"
        self._inputs = plant(input_canary, data, num_input_canaries, self._rng)
        self._inputs_in = self._rng.random(len(self._inputs)) < 0.5
        self._data = Extended(data, self._inputs)
        self.private = private = start(len(self._data))
        left_out = len(data) + np.flatnonzero(~self._inputs_in)
        if not other_records:
            left_out = np.concatenate([np.arange(len(data)), left_out])
        private.sampler = Leaving(private.sampler, left_out)
        if private.plan.secure and private.plan.permutes:
            raise InvalidArgumentError(
                "seed",
                expected="a seeded run",
                got="operating-system randomness",
                remedy="canaries must move with the shuffle, so the auditor has to know its draws",
            )
        self._initial = trainable(private.model)
        self._field = CanaryField(self._initial, num_gradient_canaries, self._rng)
        self.included = self._rng.random(num_gradient_canaries) < 0.5
        self._true_frame = self._found_frame = (
            identity(private.spec, private.device) if private.spec is not None else None
        )
        self._recorder = RecordingMechanism(private.mechanism)
        self._known = self._initial
        self.iterate_scores = np.zeros(num_gradient_canaries)
        private.engine = InjectingEngine(private.engine, self._injected)  # type: ignore[assignment]
        private.mechanism = self._recorder
        private.referee = Unwatched()

    def train(self, on_progress: OnProgress | None = None) -> None:
        """To the end of the plan, then release."""
        train_watched(
            self.private, self._data, self._losses, self._collate, self._observe, on_progress
        )
        self.private.release()

    def evidence(self) -> list[Evidence]:
        """What every threat model guesses from: one score per canary, and whether it was there."""
        final = trainable(self.private.model)
        spec = self.private.spec
        moved = frozenset() if spec is None else spec.moved_names
        unmoved = frozenset(final) - moved
        aligned = final if spec is None else realign(spec, self._initial, final).tensors
        displacement = {n: self._initial[n] - aligned[n] for n in final}
        negated = {name: -tensor for name, tensor in final.items()}
        entries = [
            ("re-alignment along the run", ThreatModel.STEP_GRADIENTS, self.iterate_scores),
            (
                "re-alignment against W_0",
                ThreatModel.FINAL_WITH_INITIAL,
                self._field.read(displacement),
            ),
        ]
        if unmoved:
            entries.append(
                (
                    "un-permuted tensors",
                    ThreatModel.FINAL_WITHOUT_INITIAL,
                    self._field.read(negated, only=unmoved),
                )
            )
        found = [
            Evidence(
                adversary=name,
                canary="gradient",
                threat_model=threat,
                scores=Inclusion(scores=scores, included=self.included),
            )
            for name, threat, scores in entries
        ]
        if len(self._inputs) > 1:
            found.append(
                Evidence(
                    adversary="loss threshold",
                    canary=self._input_name,
                    threat_model=ThreatModel.BLACK_BOX,
                    scores=Inclusion(scores=-self._queried(), included=self._inputs_in),
                )
            )
        return found

    @property
    def recovered(self) -> float:
        """Share of the permuted positions that the adversary knows the place of by now."""
        if self._true_frame is None or self._found_frame is None:
            return 1.0
        return float((self._true_frame.packed == self._found_frame.packed).double().mean())

    def notes(self) -> tuple[str, ...]:
        """How well the adversary followed the shuffle."""
        if self._true_frame is None:
            return ()
        return (
            f"re-alignment along the run recovered {self.recovered:.1%} of the permuted positions",
        )

    def _injected(self) -> dict[str, torch.Tensor]:
        """The clipped gradients of the canaries drawn for this step, in the current frame."""
        plan = self.private.plan
        joined = self._rng.random(self._field.count) < plan.sampling_prob
        sums = self._field.sum_of(joined & self.included)
        sums = {name: plan.clip_norm * t.to(self.private.device) for name, t in sums.items()}
        if self._true_frame is not None:
            apply_to_tensors(self._true_frame, sums)
        return sums

    def _observe(self) -> None:
        """After an update: follow the shuffle by matching W_{t+1} with W_t; read the release."""
        private, spec = self.private, self.private.spec
        released = dict(self._recorder.last)
        current = trainable(private.model)
        if spec is not None and self._found_frame is not None:
            apply_to_tensors(self._found_frame.inverse(), released)
            if private.plan.shuffle == "every-step" and private.plan.permutes:
                self._true_frame = self._followed(private.steps_taken - 1)
                step = realign(spec, self._known, current).permutation
                self._found_frame = self._found_frame.then(step.to(private.device))
        self.iterate_scores += self._log_ratios(released)
        self._known = current

    def _log_ratios(self, released: Tensors) -> Floats:
        """How much likelier the step is with each canary sampled into it than without it.

        Read in the blocks with the least noise; as if the batch clip let the canary through whole.
        """
        plan = self.private.plan
        sigma, rate = plan.smallest_noise_multiplier, plan.sampling_prob
        quiet = [block for block in plan.blocks if block.noise_multiplier == sigma]
        only = frozenset(name for block in quiet for name in block.parameters)
        found = self._field.read(released, only) * (plan.expected_batch_size / plan.clip_norm)
        if not 0.0 < rate < 1.0 or sigma == 0.0:
            return found
        exponents = (found - 0.5) / sigma**2 + np.log(rate)
        return np.asarray(np.logaddexp(np.log1p(-rate), exponents), dtype=np.float64)

    def _followed(self, step: int) -> Permutation:
        """The frame after the shuffle of `step`, drawn again from the run's own stream."""
        private = self.private
        assert private.spec is not None
        assert self._true_frame is not None
        key = private.streams.key("permutation", step)
        return self._true_frame.then(draw(private.spec, key, private.device))

    def _queried(self) -> Floats:
        return losses_of(self.private, self._inputs, self._losses, self._collate)
