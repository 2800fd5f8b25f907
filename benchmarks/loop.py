"""Times whole training loops: Poisson batches in physical ones, private against non-private.

python -m benchmarks.loop --workload gpt2-32x128 --logical 256

The workload's batch is the physical one; `--logical` is the expected size of the batches that are
drawn, so that most physical batches are full and the last of every step has whatever size is left.
Both loops load the same way, keep their model, and take turns block by block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.adapters import CLIP_NORM, NOISE_MULTIPLIER, Setting
from benchmarks.results import environment
from benchmarks.workloads import workload
from shuffled_dpsgd.training import PrivateTraining, make_private
from shuffled_dpsgd.training.data import LogicalBatch, physical_batches, shaped, to_device

# Records per expected batch: enough that two steps seldom share one.
RECORDS_PER_BATCH = 64
Loop = Callable[[int], int]


class Contest:
    """A private and a plain loop over the same random records; each returns how many it used."""

    def __init__(self, setting: Setting, logical: int) -> None:
        self.setting, self.logical = setting, logical
        case = self.case = setting.workload
        size = RECORDS_PER_BATCH * logical
        shape = (size, case.length)
        ids = torch.randint(1000, shape)
        labels = torch.randint(2, shape if case.family == "gpt2" else (size,))
        self.records = TensorDataset(ids, labels)
        self.private = self._private(size)
        self.model = case.build().to(setting.device).train()
        self.optimizer = setting.optimizer(self.model)
        self.steps = 0
        self.backwards = 0

    def private_loop(self, steps: int) -> int:
        """So many steps of `make_private`, shuffle included."""
        used = 0
        for batch in self.private.batches(self.records, num_steps=steps):
            losses = self._losses(self.private.model, batch)
            self.private.backward(losses)
            self.private.step()
            used += len(losses)
            self.backwards += 1
        return used

    def plain_loop(self, steps: int) -> int:
        """So many steps on batches drawn and loaded likewise."""
        used = 0
        numbers = range(self.steps, self.steps + steps)
        drawn = (tuple(self.private.sampler.indices(number).tolist()) for number in numbers)
        logical = (LogicalBatch(step=n, indices=d) for n, d in zip(numbers, drawn, strict=True))
        for part in physical_batches(
            self.records, logical, physical_batch_size=self.case.batch_size
        ):
            if part.data is not None:
                batch = to_device(shaped(part.data), self.setting.device)
                (self._losses(self.model, batch).sum() / self.logical).backward()
                used += part.size
            if part.completes:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self.steps += steps
        return used

    def _private(self, size: int) -> PrivateTraining:
        model = self.case.build().to(self.setting.device).train()
        return make_private(
            model,
            self.setting.optimizer(model),
            dataset_size=size,
            expected_batch_size=self.logical,
            num_steps=1_000_000,
            noise_multiplier=NOISE_MULTIPLIER,
            clip_norm=CLIP_NORM,
            delta=1e-6,
            scope="full",
            physical_batch_size=self.case.batch_size,
        )

    def _losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, labels = batch
        with self.setting.autocast():
            return self.case.losses(model, {"input_ids": ids, "labels": labels})


def seconds_per_record(loop: Loop, steps: int, device: torch.device) -> float:
    """What a record takes in a block of so many steps."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    # An unlucky block may have drawn nobody.
    used = max(1, loop(steps))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / used


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="gpt2-32x128", help="a model of text, as in `step`")
    parser.add_argument("--logical", type=int, default=256, help="expected size of a drawn batch")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each loop")
    parser.add_argument("--steps", type=int, default=3, help="steps a block")
    parser.add_argument(
        "--warmup", type=int, default=6,
        help="steps before any timing; more if a step is a single physical batch, whose size is "
        "then another every time",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    case, device = workload(options.workload), torch.device(options.device)
    if case.family == "vit":
        parser.error("--workload: expected a model of text")
    if min(options.logical, options.blocks, options.steps, options.warmup) < 1:
        parser.error("--logical, --blocks, --steps and --warmup: expected at least 1")
    torch.manual_seed(0)
    setting = Setting(workload=case, device=device, bfloat16=device.type == "cuda")
    contest = Contest(setting, options.logical)
    loops = {"private": contest.private_loop, "plain": contest.plain_loop}
    for loop in loops.values():
        loop(options.warmup)
    engine = contest.private.engine
    before = contest.backwards, engine.num_replayed
    found: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(options.blocks):
        for name in sorted(loops, reverse=block % 2 == 1):
            found[name].append(seconds_per_record(loops[name], options.steps, device))
    pairs = zip(found["plain"], found["private"], strict=True)
    ratios = [plain / private for plain, private in pairs]
    backwards, replayed = contest.backwards - before[0], engine.num_replayed - before[1]
    print(
        f"{case.name}, batches of {options.logical}: private at {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) of plain's speed, {replayed} of {backwards} "
        "backwards replayed"
    )
    if options.json:
        facts = environment(device, bfloat16=setting.bfloat16)
        numbers = {
            "workload": case.name,
            "logical": options.logical,
            "steps": options.steps,
            "warmup": options.warmup,
            "seconds_per_record": found,
            "backwards": backwards,
            "replayed": replayed,
        }
        options.json.write_text(json.dumps({"environment": facts, **numbers}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
