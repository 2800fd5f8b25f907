"""Releases of a real run's own mechanism and shuffle, with and without a canary.

A probe takes the parts a run is composed of (mechanism, permutation spec, plan) and lets them
process one chosen sum many times, each time with fresh noise and a fresh permutation. What comes
out is what an adversary of that step would see; all values are in units of `clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shuffled_dpsgd.auditing.adversaries import ThreatModel
from shuffled_dpsgd.auditing.estimators.scores import ScorePair
from shuffled_dpsgd.auditing.verdict import Evidence
from shuffled_dpsgd.permutation import Permutation, apply_to_tensors, draw
from shuffled_dpsgd.training.private import PrivateTraining

Tensors = Mapping[str, torch.Tensor]
OnProgress = Callable[[int, int], object]
"""Called with (done, total)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One release. Who may look at what is the threat model's business.

    `noisy` is the mechanism's output before the shuffle, `previous` that of an earlier step without
    canary, `weights` the weights before the step, which has the length `step_size`.
    """

    noisy: Tensors
    previous: Tensors
    weights: Tensors
    step_size: float
    permutation: Permutation | None

    def shuffled(self, name: str) -> torch.Tensor:
        """The released gradient of one parameter, as the shuffle left it."""
        tensor = {name: self.noisy[name].clone()}
        if self.permutation is not None and name in self.permutation.spec.moved_names:
            apply_to_tensors(self.permutation, tensor)
        return tensor[name]

    def new_weights(self) -> dict[str, torch.Tensor]:
        """The weights after one plain gradient step and the shuffle."""
        after = {n: w - (self.step_size * self.noisy[n]).to(w) for n, w in self.weights.items()}
        if self.permutation is not None:
            apply_to_tensors(self.permutation, after)
        return after


class ModelAttack(Protocol):
    """A canary in a model's own tensors, of joint norm one, and how its presence is read."""

    @property
    def name(self) -> str: ...

    @property
    def canary_name(self) -> str: ...

    @property
    def threat_model(self) -> ThreatModel: ...

    @property
    def canary(self) -> Tensors: ...

    def read(self, seen: Seen) -> float: ...


class Prober:
    """Makes releases of one run at will; its own steps never collide with those of training."""

    def __init__(self, private: PrivateTraining, *, seed: int) -> None:
        self._private = private
        self._weights = {
            name: p.detach().clone()
            for name, p in private.model.named_parameters()
            if p.requires_grad
        }
        self._generator = torch.Generator(private.device).manual_seed(seed)
        self._step = private.plan.num_steps
        self._previous: Tensors = {}
        self.release(None)

    def release(self, canary: Tensors | None) -> Seen:
        """One step in which no record takes part, or nothing but the canary."""
        private, plan = self._private, self._private.plan
        sums = {
            name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for name, w in self._weights.items()
        }
        for name, tensor in (canary or {}).items():
            sums[name] += plan.clip_norm * tensor.to(sums[name])
        self._step += 1
        private.mechanism.privatize(sums, step=self._step)
        scale = plan.expected_batch_size / plan.clip_norm
        rate = float(private.optimizer.param_groups[0]["lr"]) or 1.0
        spec = private.spec if plan.permutes else None
        seen = Seen(
            noisy={name: tensor * scale for name, tensor in sums.items()},
            previous=self._previous,
            weights=self._weights,
            step_size=rate / scale,
            permutation=None if spec is None else draw(spec, self._generator),
        )
        if canary is None:
            self._previous = seen.noisy
        return seen


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the trainable weights, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


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
                marked[key] = prober.release(attack.canary)
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
