"""Worst-case initial weights: fitted to the records before the audited run starts.

A guarantee holds whatever the initial weights are, so an auditor may choose them. At weights that
fit the records already, these have small gradients, and a canary stands out among them: in a batch
clip that it shares with fewer, and in a loss that little else has moved (Annamalai & De Cristofaro,
2024). The fit has no privacy and is part of the audit alone; its weights are never released.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.probes import OnProgress
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import MapStyle, shaped, to_device
from shuffled_dpsgd.training.physical import PerSampleLoss

LEARNING_RATE = 1e-3


def fit_to_records(
    model: torch.nn.Module,
    data: MapStyle,
    losses: PerSampleLoss,
    *,
    num_steps: int,
    collate: Callable[[list[Any]], Any] | None = None,
    batch_size: int = 64,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> float:
    """Fit trainable weights in place by AdamW, without privacy; the mean loss of the last tenth.

    Batches are drawn with a generator of their own. Mode and gradients are put back.
    """
    if num_steps < 1:
        raise InvalidArgumentError("num_steps", expected="at least 1", got=num_steps)
    device = next(model.parameters()).device
    gather = collate or default_collate
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    mode = model.training
    model.train()
    last: list[float] = []
    for step in range(num_steps):
        chosen = torch.randint(len(data), (min(batch_size, len(data)),), generator=generator)
        batch = to_device(shaped(gather([data[int(i)] for i in chosen])), device)
        loss = losses(model, batch).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step >= num_steps - max(1, num_steps // 10):
            last.append(float(loss.detach()))
        if on_progress is not None:
            on_progress(step + 1, num_steps)
    optimizer.zero_grad(set_to_none=True)
    model.train(mode)
    return sum(last) / len(last)
