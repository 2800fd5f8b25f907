"""Advice on a run before anything is spent: its plan, what it can hope for, what would help.

From public quantities alone: sizes, ε, δ, noise, and the initial weights. No record is looked at;
their number is public, because the plan reveals it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from shuffled_dpsgd.accounting import PrivacyClaim, UnitComparison
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.options import PrivacyOptions, options_in
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.models import choose_trained, describe_choices, simpler_model
from shuffled_dpsgd.tasks.results import count_parameters
from shuffled_dpsgd.tasks.start import chosen_device, start_private
from shuffled_dpsgd.tasks.task import build_task
from shuffled_dpsgd.training.alternatives import Alternative, alternatives
from shuffled_dpsgd.training.planning import large_delta, make_plan
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
from shuffled_dpsgd.training.spending import paper_estimate
from shuffled_dpsgd.training.symmetries import symmetries_of

# About the norm of usual gradients. With a far smaller clip all gradients have the same norm, and a
# classifier drifts to the commonest class; docs/advice.md has runs.
_CLIP_NORM = 1.0
# Below this bound over the run, the simpler model won in every recorded run. More runs are recorded
# on the digits, where it won up to a higher bound.
SIMPLE_WINS_BELOW, SIMPLE_WINS_ON = 1.0, {"digits": 10.0}
_FLOAT_BYTES = 4
# Weights, clipped sums, and AdamW's two moments; SGD has one at most.
_TENSORS_PER_WEIGHT = {"adamw": 4, "adam": 4, "sgd": 3}


@dataclass(frozen=True, kw_only=True)
class Simpler:
    """A model of fewer weights for the same task: the keys that ask for it, and its prospect.

    In runs of the task on record it won wherever the larger model's bound was less than `below`.
    """

    keys: str
    prospect: Prospect
    below: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"keys": self.keys, "dimension": self.prospect.dimension, **self.prospect.to_json()}


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A plan and its claims. `memory_bytes` does not include activations.

    `chosen` says what the method chose where the file was silent. `simpler` has the keys and the
    number of weights of a simpler model, if there is one; `embeddings` are trained weights of
    embedding tables.
    """

    plan: PrivacyPlan
    certified: PrivacyClaim | None
    paper: PrivacyClaim | None
    total_parameters: int
    trainable_parameters: int
    memory_bytes: int
    chosen: str | None = None
    simpler: tuple[str, int] | None = None
    simpler_below: float = SIMPLE_WINS_BELOW
    embeddings: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data; every ε beside its kind. σ of the rest is σ0 where a block is shuffled."""
        plan = self.plan
        return {
            "num_steps": plan.num_steps,
            "sampling_prob": plan.sampling_prob,
            "dataset_size": plan.dataset_size,
            "clip_norm": plan.clip_norm if math.isfinite(plan.clip_norm) else None,
            "noise_multipliers": {block.name: block.noise_multiplier for block in plan.blocks},
            "blocks": {
                block.name: {
                    "dimension": block.dimension,
                    "noise_multiplier": block.noise_multiplier,
                    "batch_clip_norm": block.batch_clip_norm,
                }
                for block in plan.blocks
            },
            "falls_back": plan.falls_back,
            "certified": None if self.certified is None else self.certified.to_json(),
            "why_not_certified": list(plan.uncertifiable),
            "paper": None if self.paper is None else self.paper.to_json(),
            "total_parameters": self.total_parameters,
            "trainable_parameters": self.trainable_parameters,
            "memory_bytes_without_activations": self.memory_bytes,
            "chosen_by_method": self.chosen,
            "warning": large_delta(plan),
        }


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
    units: UnitComparison | None = None
    alternatives: tuple[Alternative, ...] = ()

    @property
    def simpler(self) -> Simpler | None:
        """The simpler model that is likely to learn more under the same noise."""
        now, run = self.now, self.preview
        if run is None or run.simpler is None or now.over_run >= run.simpler_below:
            return None
        keys, dimension = run.simpler
        noise = now.noise_multiplier * math.sqrt(dimension)
        prospect = replace(now, dimension=dimension, noise_norm=noise)
        return Simpler(keys=keys, prospect=prospect, below=run.simpler_below)

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
            "alternatives": [each.to_json() for each in self.alternatives],
            "needed_alone": asdict(self.needs),
            "units": None if self.units is None else self.units.to_json(),
            "simpler_model": None if self.simpler is None else self.simpler.to_json(),
            "suggested": {
                "expected_batch_size": self.batch.expected_batch_size,
                "num_steps": self.batch.num_steps,
                "clip_norm": self.clip_norm,
                "learning_rate": self.learning_rate,
            },
        }


def advise_numbers(*, epsilon: float, delta: float, **sizes: int) -> Advice:
    """Advice from numbers alone, without a model."""
    now = calibrated_prospect(epsilon=epsilon, delta=delta, **sizes)
    return _advice(now, epsilon=epsilon, delta=delta)


def advise_run(config: RunConfig) -> Advice:
    """Advice on a run as its configuration has it; loads its data and its model, trains nothing."""
    task = build_task(config)
    model = task.model.to(chosen_device(config.training.device))
    private = start_private(config, model, dataset_size=task.dataset_size, units=task.units)
    plan = private.plan
    private.close()
    found = _advice_on(_preview(plan, model, config))
    if not found.now.noise_multiplier:
        return found  # Without noise no ratio speaks for a clip or a rate.
    rate = suggested_learning_rate(
        found.batch,
        weight_scale=_weight_scale(model),
        optimizer=config.optimizer.name,
        clip_norm=_CLIP_NORM,
    )
    return replace(found, clip_norm=_CLIP_NORM, learning_rate=rate)


def advise_shapes(config: RunConfig, **known: Any) -> Advice:
    """Advice on a run without its weights and data; takes what `preview_shapes` takes."""
    return _advice_on(preview_shapes(config, **known))


def preview_shapes(
    config: RunConfig, *, model: str, dataset_size: int, num_labels: int | None = None
) -> Preview:
    """The preview of a run whose model is known by its shapes alone, without weights or data."""
    shapes = build_model(model, num_labels=num_labels)
    choose_trained(shapes, config.model)
    options = PrivacyOptions(
        **options_in(config.privacy), **options_in(config.training), dataset_size=dataset_size
    )
    config.optimizer.check_length(options.steps())
    spec = symmetries_of(shapes, options)
    moved = frozenset() if spec is None else spec.moved_names
    sizes = {name: p.numel() for name, p in shapes.named_parameters() if p.requires_grad}
    return _preview(make_plan(options, sizes=sizes, moved=moved), shapes, config)


def _preview(plan: PrivacyPlan, model: nn.Module, config: RunConfig) -> Preview:
    sizes = count_parameters(model)
    total, trainable = sizes["total_parameters"], sizes["trainable_parameters"]
    weights = _TENSORS_PER_WEIGHT[config.optimizer.name] * trainable + (total - trainable)
    return Preview(
        plan=plan,
        certified=plan.certified(),
        paper=paper_estimate(plan),
        **sizes,
        memory_bytes=_FLOAT_BYTES * weights,
        chosen=describe_choices(config, model),
        simpler=simpler_model(config, model),
        simpler_below=SIMPLE_WINS_ON.get(config.task, SIMPLE_WINS_BELOW),
        embeddings=sum(
            table.weight.numel()
            for table in model.modules()
            if isinstance(table, nn.Embedding) and table.weight.requires_grad
        ),
    )


def _advice_on(preview: Preview) -> Advice:
    """Advice at the plan's target ε if that is proven, else at its certified ε."""
    plan, target = preview.plan, None
    if plan.accounting != "paper":
        certified = preview.certified
        target = plan.epsilon or (None if certified is None else certified.epsilon)
    return _advice(prospect_of(plan), epsilon=target, delta=plan.delta, preview=preview)


def _advice(
    now: Prospect, *, epsilon: float | None, delta: float, preview: Preview | None = None
) -> Advice:
    """Neighbouring plans are priced at the certified ε; without one there are none."""
    target = epsilon if math.isfinite(now.over_run) else None
    batches: tuple[Prospect, ...] = ()
    twice, more = None, tuple[Alternative, ...]()
    if target is not None:
        known: dict[str, Any] = {}
        if preview is not None:
            known = {"embeddings": preview.embeddings, "largest_batch": preview.plan.largest_batch}
        more = tuple(alternatives(now, epsilon=target, delta=delta, **known))
        batches = tuple(other_batches(now, epsilon=target, delta=delta))
        twice = longer(now, epsilon=target, delta=delta)
    return Advice(
        now=now,
        epsilon=epsilon,
        delta=delta,
        batches=batches,
        twice_as_long=twice,
        needs=needs_of(now, epsilon=target, delta=delta),
        preview=preview,
        alternatives=more,
    )


def _weight_scale(model: nn.Module) -> float:
    """Root mean square of the trainable matrices; norms and biases are no measure of it."""
    matrices = [p.detach() for p in model.parameters() if p.requires_grad and p.dim() > 1]
    matrices = [m for m in matrices if bool(m.any())] or list(model.parameters())
    total = sum(float(m.double().square().sum()) for m in matrices)
    return math.sqrt(total / sum(m.numel() for m in matrices))
