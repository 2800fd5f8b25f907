"""A program as users start it with `accelerate launch`: a loop of their own, then the Trainer.

    accelerate launch --multi_gpu --num_processes 2 accelerated.py FOLDER

Every process leaves what it found in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from distributed.replicas import refusal
from distributed.trainer import trained
from shuffled_dpsgd.distributed import current_world
from shuffled_dpsgd.training import make_private
from training.cases import RECORDS, mlp_case

OPTIONS = {
    "dataset_size": RECORDS,
    "expected_batch_size": 8,
    "num_steps": 4,
    "noise_multiplier": 0.5,
    "delta": 1e-4,
    "seed": 3,
    "physical_batch_size": 2,
}


def loop() -> dict[str, Any]:
    """The model and the optimizer stay out of `accelerator.prepare`."""
    accelerator = Accelerator(cpu=True)
    case = mlp_case(torch.float64)
    model = case.make().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    private = make_private(model, optimizer, **OPTIONS)  # type: ignore[arg-type]
    for batch in private.batches(case.data):
        private.backward(case.loss(model, batch))
        private.step()
    private.close()
    found = {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "spent": private.ledger.spent,
        "processes": accelerator.num_processes,
    }
    prepared, stepped = accelerator.prepare(model, optimizer)
    return found | {
        "model prepared": refusal(lambda: make_private(prepared, optimizer, **OPTIONS)),  # type: ignore[arg-type]
        "optimizer prepared": refusal(lambda: make_private(model, stepped, **OPTIONS)),  # type: ignore[arg-type]
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {"loop": loop(), "trainer": trained(str(folder / "trainer"))}
    torch.save(results, folder / f"rank-{current_world().rank}.pt")
