"""What a run will do, before anything is loaded or spent: its plan, its claims, its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.options import PrivacyOptions, options_in
from shuffled_dpsgd.permutation import discover
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.models import choose_trained, describe_choices
from shuffled_dpsgd.training.planning import large_delta, make_plan
from shuffled_dpsgd.training.spending import paper_estimate

_FLOAT_BYTES = 4
# Weights, clipped sums, and AdamW's two moments; SGD has one at most.
_TENSORS_PER_WEIGHT = {"adamw": 4, "adam": 4, "sgd": 3}


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A plan with what it claims; `memory_bytes` leaves activations out, which batches decide.

    `chosen` says what the method chose where the file was silent.
    """

    plan: PrivacyPlan
    certified: PrivacyClaim | None
    paper: PrivacyClaim | None
    total_parameters: int
    trainable_parameters: int
    memory_bytes: int
    chosen: str | None = None

    @property
    def noise(self) -> dict[str, float]:
        """σ of each block; where there is a shuffled one, the rest's is σ0."""
        return {block.name: block.noise_multiplier for block in self.plan.blocks}

    def to_json(self) -> dict[str, Any]:
        """Plain data; every ε beside its kind."""
        plan = self.plan
        return {
            "num_steps": plan.num_steps,
            "sampling_prob": plan.sampling_prob,
            "dataset_size": plan.dataset_size,
            "clip_norm": plan.clip_norm if math.isfinite(plan.clip_norm) else None,
            "noise_multipliers": self.noise,
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


def preview_of(plan: PrivacyPlan, model: nn.Module, config: RunConfig) -> Preview:
    """The preview of a plan that was made for `model`."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total = sum(size for size, _ in sizes)
    trainable = sum(size for size, trains in sizes if trains)
    weights = _TENSORS_PER_WEIGHT[config.optimizer.name] * trainable + (total - trainable)
    return Preview(
        plan=plan,
        certified=plan.certified(),
        paper=paper_estimate(plan),
        total_parameters=total,
        trainable_parameters=trainable,
        memory_bytes=_FLOAT_BYTES * weights,
        chosen=describe_choices(config, model),
    )


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
    moved: frozenset[str] = frozenset()
    if options.needs_blocks:
        moved = discover(shapes, scope=options.scope).moved_names
    sizes = {name: p.numel() for name, p in shapes.named_parameters() if p.requires_grad}
    plan = make_plan(options, sizes=sizes, moved=moved)
    return preview_of(plan, shapes, config)
