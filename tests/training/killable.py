"""Short private runs in processes of their own, made to be killed and started again.

For every line "directory steps seed" on stdin (seed "none" for a secure run), fork a run, print
its process id, wait for it and print its exit code. Forking spares each run the import of torch.
Every update is noted in `released.txt`, after the fact, so that the ledger can be held against it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every run
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.training import LoopSettings, Progress, make_private, train

RECORDS = 64


def main(directory: Path, num_steps: int, seed: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = TensorDataset(torch.randn(RECORDS, 5), torch.randint(2, (RECORDS,)))
    private = make_private(
        model,
        optimizer,
        dataset_size=RECORDS,
        expected_batch_size=4,
        num_steps=num_steps,
        noise_multiplier=0.7,
        delta=1e-4,
        shuffle="off",
        seed=seed,
        physical_batch_size=3,
        ledger_path=directory / "ledger.jsonl",
    )

    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        inputs, labels = batch  # type: ignore[misc]
        return nn.functional.cross_entropy(model(inputs), labels, reduction="none")

    def note(progress: Progress) -> None:
        with open(directory / "released.txt", "a", encoding="utf-8") as file:
            file.write(f"{progress.metrics.step} {private.ledger.spent}\n")

    settings = LoopSettings(
        checkpoint_dir=directory / "checkpoints", checkpoint_every=7, price_steps=False
    )
    outcome = train(
        private,
        data,
        loss,
        settings=settings,
        callbacks=[note],
        scheduler=scheduler,
        resume=True,
    )
    final = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save(final, directory / "final.pt")
    (directory / "outcome.txt").write_text(
        f"{outcome.steps_taken} {outcome.finished} {outcome.interrupted_by}", encoding="utf-8"
    )


def serve() -> None:
    for line in sys.stdin:
        directory, num_steps, seed = line.split()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                main(Path(directory), int(num_steps), None if seed == "none" else int(seed))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
    os._exit(0)  # Taking apart all that was imported takes a second.
