"""A run that several ranks begin and others end; run by `nursery.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.sharded_models import spread, whole
from shuffled_dpsgd.options import Shuffle
from shuffled_dpsgd.tasks.averaging import WeightAverage
from shuffled_dpsgd.training import LoopSettings, Progress, make_private, train

RECORDS = 64


def run(
    directory: str,
    *,
    num_steps: int,
    stop_after: int | None = None,
    secure: bool = False,
    sharded: bool | str = False,
    shuffle: Shuffle = "auto",
) -> dict[str, Any]:
    """Begin or resume the run in `directory`; with `stop_after`, stop as a signal would."""
    folder = Path(directory)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    if sharded:
        model = spread(lambda made=model: made, sharded)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    inputs = torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    average = WeightAverage(model, decay=0.8)
    private = make_private(
        model,
        optimizer,
        dataset_size=RECORDS,
        expected_batch_size=6,
        num_steps=num_steps,
        noise_multiplier=0.7,
        delta=1e-4,
        seed=None if secure else 5,
        shuffle=shuffle,
        physical_batch_size=3,
        ledger_path=folder / "ledger.jsonl",
    )
    started_at: list[int] = []

    def note(progress: Progress) -> None:
        started_at.append(progress.metrics.step)
        average.update(model)
        if private.world.leads:
            with open(folder / "released.txt", "a", encoding="utf-8") as file:
                file.write(f"{progress.metrics.step} {private.ledger.spent}\n")
        if stop_after is not None and len(started_at) == stop_after:
            private.pause()

    settings = LoopSettings(
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=3,
        price_steps=False,
        extras={"average": average},
    )
    outcome = train(
        private, data, loss, settings=settings, callbacks=[note], scheduler=scheduler, resume=True
    )
    kept = [whole(p) for p in model.parameters()]
    with average.standing_in(model):
        averaged = [whole(p) for p in model.parameters()]
    assert all(torch.equal(whole(p), one) for p, one in zip(model.parameters(), kept, strict=True))
    return {
        "weights": torch.cat([whole(p).flatten() for p in model.parameters()]),
        "average": torch.cat([one.flatten() for one in averaged]),
        "steps": outcome.steps_taken,
        "finished": outcome.finished,
        "interrupted": outcome.interrupted_by,
        "spent": private.ledger.spent,
        "first": started_at[0] if started_at else None,
        "lost": outcome.steps_lost,
    }


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
