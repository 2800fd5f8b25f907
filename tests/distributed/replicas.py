"""What ranks with the whole model each do in the tests; run by `nursery.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from shuffled_dpsgd.distributed import current_world
from shuffled_dpsgd.training import PrivateTraining, make_private
from training.cases import (
    RECORDS,
    Case,
    FixedSampler,
    bert_case,
    gpt2_case,
    mlp_case,
    run,
    vit_case,
    weights,
)

CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "bert": bert_case,
    "gpt2": gpt2_case,
    "vit": vit_case,
    "mlp": mlp_case,
}
# None, one, fewer than ranks, and more than a physical batch.
UNEVEN: tuple[list[int], ...] = ([], [3], [1, 2, 9], list(range(5, 22)))
STEPS = len(UNEVEN)


def start(case: Case, **changes: Any) -> PrivateTraining:
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options: dict[str, Any] = {
        "dataset_size": RECORDS,
        "expected_batch_size": 8,
        "num_steps": STEPS,
        "noise_multiplier": 0.5,
        "delta": 1e-4,
        "seed": 3,
        "physical_batch_size": 4,
        **changes,
    }
    private = make_private(model, optimizer, **options)
    private.sampler = FixedSampler(*UNEVEN)
    return private


PAPER = {
    "accounting": "paper",
    "unshuffled_noise_multiplier": 0.8,
    "batch_clip_norm": 1.5,
    "clip_norm": 1.0,
}


def trained(name: str, **changes: Any) -> dict[str, Any]:
    """Uneven steps in float64: everything that must not depend on the number of ranks."""
    case = CASES[name](torch.float64)
    private = start(case, **PAPER | changes)
    metrics: list[dict[str, Any]] = []
    private.on_update(lambda: metrics.append(private.last_metrics.to_json()))  # type: ignore[union-attr]
    run(private, case)
    private.release()
    state = private.optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items() if v.dim()}
    return {
        "weights": weights(private.model) | moments,
        "metrics": metrics,
        "spent": private.ledger.spent,
        "card": str(private.card()),
        "norms": private.last_sample_norms.sort().values,
    }


def several(names: list[str]) -> dict[str, Any]:
    """The equalities, with noise and without it, in one launch."""
    found = {name: trained(name) for name in names}
    for name in names:
        found[f"{name} without noise"] = trained(
            name, noise_multiplier=0.0, unshuffled_noise_multiplier=0.0
        )
    return found


def alone(names: list[str]) -> dict[str, Any]:
    """The same in one process."""
    del os.environ["WORLD_SIZE"]
    assert current_world().size == 1
    return several(names)
