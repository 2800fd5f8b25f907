"""Releases of a real run's own mechanism and shuffle, with and without a canary.

A probe takes the parts a run is composed of (mechanism, permutation spec, plan) and lets them
process one chosen sum many times, each time with fresh noise and a fresh permutation. What comes
out is what an adversary of that step would see; all values are in units of `clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from shuffled_dpsgd.auditing.alignment import Aligner
from shuffled_dpsgd.auditing.estimators.scores import ScorePair
from shuffled_dpsgd.auditing.taps import OnProgress, Tensors, refuse_shared_steps
from shuffled_dpsgd.auditing.updates import RewoundOptimizer
from shuffled_dpsgd.auditing.verdict import Evidence, ThreatModel
from shuffled_dpsgd.permutation import Permutation, apply_to_tensors, draw
from shuffled_dpsgd.training.private import PrivateTraining


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One release. Who may look at what is the threat model's business.

    `noisy` is the mechanism's output before the shuffle, `previous` that of an earlier step without
    canary. `optimizer` holds the weights before the step and takes it; `aligner` is None where
    nothing is shuffled; `unit` is the gradient that counts as one.
    """

    noisy: Tensors
    previous: Tensors
    optimizer: RewoundOptimizer
    aligner: Aligner | None
    unit: float
    permutation: Permutation | None

    def shuffled(self, name: str) -> torch.Tensor:
        """The released gradient of one parameter, as the shuffle left it."""
        tensor = {name: self.noisy[name].clone()}
        if self.permutation is not None and name in self.permutation.spec.moved_names:
            apply_to_tensors(self.permutation, tensor)
        return tensor[name]

    def new_weights(self) -> dict[str, torch.Tensor]:
        """The weights after the step of the run's own optimizer, and the shuffle."""
        after = self.optimizer.step({n: t * self.unit for n, t in self.noisy.items()})
        if self.permutation is not None:
            apply_to_tensors(self.permutation, after)
        return after

    @cached_property
    def from_iterates(self) -> Tensors:
        """The gradient as whoever sees the iterates gets it: re-align, then undo the update."""
        after = self.new_weights()
        if self.aligner is not None:
            after = self.aligner.align(after).tensors
        found = self.optimizer.read_back(after)
        return {name: tensor / self.unit for name, tensor in found.items()}


@dataclass(frozen=True, kw_only=True)
class ModelAttack:
    """A canary in a model's own tensors and how its presence is read.

    `canary` is what the adversary looks for; `contribution` draws what joins the sum in a release,
    of joint norm at most one: the canary itself where it is not given.
    """

    name: str
    canary_name: str
    canary: Tensors
    read: Callable[[Seen], float]
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS
    contribution: Callable[[], Tensors] | None = None


class Prober:
    """Makes releases of one run at will; its own steps never collide with those of training."""

    def __init__(self, private: PrivateTraining, *, seed: int) -> None:
        plan = private.plan
        refuse_shared_steps(plan)
        self._private = private
        self._spec = private.spec if plan.permutes else None
        self._scale = plan.expected_batch_size / plan.clip_norm
        self._optimizer = RewoundOptimizer(private)
        known = self._optimizer.weights
        self._aligner = None if self._spec is None else Aligner(self._spec, known)
        self._generator = torch.Generator(private.device).manual_seed(seed)
        self._step = plan.num_steps
        self._previous: Tensors = {}
        self.release(None)

    def release(self, canary: Tensors | None) -> Seen:
        """One step in which no record takes part, or nothing but the canary."""
        private = self._private
        sums = {
            name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for name, w in self._optimizer.weights.items()
        }
        for name, tensor in (canary or {}).items():
            sums[name] += private.plan.clip_norm * tensor.to(sums[name])
        self._step += 1
        # No record is in these sums: the mechanism is what is attacked.
        private.mechanism.privatize(sums, key=private.streams.key("noise", self._step))
        seen = Seen(
            noisy={name: tensor * self._scale for name, tensor in sums.items()},
            previous=self._previous,
            optimizer=self._optimizer,
            aligner=self._aligner,
            unit=1.0 / self._scale,
            permutation=None if self._spec is None else draw(self._spec, self._generator),
        )
        if canary is None:
            self._previous = seen.noisy
        return seen


def probe(
    prober: Prober,
    attacks: Sequence[ModelAttack],
    *,
    count: int,
    on_progress: OnProgress | None = None,
) -> list[Evidence]:
    """`count` releases without and with each attack's canary, read by that attack.

    The releases without a canary are shared by all attacks, those with by attacks on the same one.
    """
    out: list[list[float]] = [[] for _ in attacks]
    present: list[list[float]] = [[] for _ in attacks]
    for done in range(1, count + 1):
        plain = prober.release(None)
        marked: dict[int, Seen] = {}
        for index, attack in enumerate(attacks):
            key = id(attack.canary)
            if key not in marked:
                joining = attack.canary if attack.contribution is None else attack.contribution()
                marked[key] = prober.release(joining)
            out[index].append(attack.read(plain))
            present[index].append(attack.read(marked[key]))
        if on_progress is not None:
            on_progress(done, count)
    return [
        Evidence(
            adversary=attack.name,
            canary=attack.canary_name,
            threat_model=attack.threat_model,
            scores=ScorePair(out=np.array(without), present=np.array(with_canary)),
        )
        for attack, without, with_canary in zip(attacks, out, present, strict=True)
    ]
