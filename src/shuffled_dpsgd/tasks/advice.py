"""Advice on a plan before anything is spent: what it can hope for, and what would help.

From public quantities alone: sizes, ε, δ, noise, and the initial weights. No record is looked at;
their number is public, because the plan reveals it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.preview import Preview, preview_of, preview_shapes
from shuffled_dpsgd.tasks.start import chosen_device, start_private
from shuffled_dpsgd.tasks.task import build_task
from shuffled_dpsgd.training.prospect import (
    Needs,
    Prospect,
    best_batch,
    calibrated_prospect,
    longer,
    needs_of,
    other_batches,
    prospect_of,
    suggested_learning_rate,
)

# About as long as gradients are. Far below that every record pulls alike, however well it is
# answered already, and a classifier drifts to the commonest class; docs/advice.md has runs.
_CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A plan's prospect, those of its neighbours, and what is suggested."""

    now: Prospect
    epsilon: float | None
    delta: float
    batches: tuple[Prospect, ...]
    twice_as_long: Prospect | None
    needs: Needs
    clip_norm: float | None = None
    learning_rate: float | None = None
    preview: Preview | None = None

    @property
    def batch(self) -> Prospect:
        """The batch size to take, with its number of steps."""
        return best_batch([self.now, *self.batches])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        preview = {} if self.preview is None else {"run": self.preview.to_json()}
        return preview | {
            "plan": {"epsilon": self.epsilon, "delta": self.delta, **self.now.to_json()},
            "explanation": self.now.explanation,
            "other_batches": [other.to_json() for other in self.batches],
            "twice_as_long": None if self.twice_as_long is None else self.twice_as_long.to_json(),
            "needed_alone": asdict(self.needs),
            "suggested": {
                "expected_batch_size": self.batch.expected_batch_size,
                "num_steps": self.batch.num_steps,
                "clip_norm": self.clip_norm,
                "learning_rate": self.learning_rate,
            },
        }


def advise_numbers(
    *,
    epsilon: float,
    delta: float,
    dataset_size: int,
    expected_batch_size: int,
    num_steps: int,
    dimension: int,
) -> Advice:
    """Advice on a plan of which only the numbers are known."""
    now = calibrated_prospect(
        epsilon=epsilon,
        delta=delta,
        dataset_size=dataset_size,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        dimension=dimension,
    )
    return _advice(now, epsilon=epsilon, delta=delta)


def advise_run(config: RunConfig) -> Advice:
    """Advice on a run as its configuration has it; loads its data and its model, trains nothing."""
    task = build_task(config)
    model = task.model.to(chosen_device(config.training.device))
    private = start_private(config, model, dataset_size=len(task.train_data))
    plan = private.plan
    private.close()
    found = replace(_advice_on(plan), preview=preview_of(plan, model, config))
    if not found.now.noise_multiplier:
        return found  # Without noise no ratio speaks for a clip or a rate.
    rate = suggested_learning_rate(
        found.batch,
        weight_scale=weight_scale(model),
        optimizer=config.optimizer.name,
        clip_norm=_CLIP_NORM,
    )
    return replace(found, clip_norm=_CLIP_NORM, learning_rate=rate)


def advise_shapes(
    config: RunConfig, *, model: str, dataset_size: int, num_labels: int | None = None
) -> Advice:
    """Advice on a run whose weights and data are not at hand, from its model's shapes."""
    preview = preview_shapes(config, model=model, dataset_size=dataset_size, num_labels=num_labels)
    return replace(_advice_on(preview.plan), preview=preview)


def _advice_on(plan: PrivacyPlan) -> Advice:
    """Advice at the ε a plan was calibrated to, where that is proven, or else at what is."""
    certified = plan.certified()
    target = plan.epsilon if plan.accounting != "paper" else None
    if target is None and plan.accounting != "paper" and certified is not None:
        target = certified.epsilon
    return _advice(prospect_of(plan), epsilon=target, delta=plan.delta)


def _advice(now: Prospect, *, epsilon: float | None, delta: float) -> Advice:
    """Neighbouring plans are priced at the certified ε; without one there are none."""
    priced = epsilon is not None and math.isfinite(now.over_run)
    return Advice(
        now=now,
        epsilon=epsilon,
        delta=delta,
        batches=tuple(other_batches(now, epsilon=epsilon, delta=delta))
        if priced and epsilon is not None
        else (),
        twice_as_long=longer(now, epsilon=epsilon, delta=delta)
        if priced and epsilon is not None
        else None,
        needs=needs_of(now, epsilon=epsilon if priced else None, delta=delta),
    )


def weight_scale(model: nn.Module) -> float:
    """Root mean square of the trainable matrices; norms and biases are no measure of it."""
    matrices = [p.detach() for p in model.parameters() if p.requires_grad and p.dim() > 1]
    matrices = [m for m in matrices if bool(m.any())] or list(model.parameters())
    total = sum(float(m.double().square().sum()) for m in matrices)
    return math.sqrt(total / sum(m.numel() for m in matrices))
