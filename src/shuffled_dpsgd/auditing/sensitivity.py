"""Replay: one step on neighbouring batches with equal randomness and no noise.

What is proven rests on one fact: adding or removing a record moves the released sum by at most
`clip_norm`. Here that fact is measured on the composed parts of a run (engine, batch clip,
divisor), release by release. Four further invariants follow from the algorithm as written: sums
add up over records, do not depend on how a batch is split, carry nothing over to the next step,
and the shuffled block obeys its batch clip.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.checks import Check, CheckReport
from shuffled_dpsgd.auditing.taps import RecordingMechanism, Unwatched
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import Clip, Strategy
from shuffled_dpsgd.training.assemble import make_private
from shuffled_dpsgd.training.data import shaped, to_device
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining

Sums = dict[str, torch.Tensor]
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far two orders of summation may differ, relative to the sum."""
MOST_RELEASES = 10**9
SENSITIVITY_SLACK = 1e-6
"""The engine's law: no sample contributes more than clip_norm·(1 + 1e-6)."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Examples to replay and how to turn a list of them into losses."""

    examples: Sequence[Any]
    losses: PerSampleLoss
    collate: Callable[[list[Any]], Any] | None = None

    def batch(self, indices: Sequence[int], device: torch.device, dtype: torch.dtype) -> Any:
        loaded = (self.collate or default_collate)([self.examples[i] for i in indices])
        return _cast(to_device(shaped(loaded), device), dtype)


class Replay:
    """Steps of a noiseless run on chosen records, undoing nothing because nothing is updated."""

    def __init__(self, private: PrivateTraining, records: Records) -> None:
        noise = private.plan.smallest_noise_multiplier
        rates = {group["lr"] for group in private.optimizer.param_groups}
        if private.plan.sampling != "unaccounted" or noise != 0.0 or rates != {0.0}:
            raise InvalidArgumentError(
                "private",
                expected="sampling='unaccounted', noise_multiplier=0 and learning rate 0",
                got=(private.plan.sampling, noise, rates),
                remedy="a replay feeds its own batches and must leave the weights alone",
            )
        self.private = private
        # What is measured here is the engine as it is, faults included.
        private.referee = Unwatched()
        self.dtype = next(p.dtype for p in private.model.parameters() if p.is_floating_point())
        self._records = records

    def release(self, indices: Sequence[int], *, part_size: int | None = None) -> Sums:
        """What one step on these records releases, times the expected batch size, in float64."""
        private = self.private
        recorder = RecordingMechanism(private.mechanism)
        private.mechanism = recorder
        try:
            with private, torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self._accumulate(indices, part_size or max(len(indices), 1))
                private.step()
        finally:
            private.mechanism = recorder.inner
        scale = private.plan.expected_batch_size
        return {name: tensor.double() * scale for name, tensor in recorder.last.items()}

    def _accumulate(self, indices: Sequence[int], part_size: int) -> None:
        private = self.private
        for start in range(0, len(indices), part_size):
            part = list(indices[start : start + part_size])
            batch = self._records.batch(part, private.device, self.dtype)
            private.backward(self._records.losses(private.model, batch))


def quiet_run(
    model: torch.nn.Module,
    *,
    expected_batch_size: int,
    clip: Clip = "flat",
    clip_norm: float = 1.0,
    batch_clip_norm: float | None = None,
    strategy: Strategy = "bookkeeping",
) -> PrivateTraining:
    """A run that a replay accepts: no noise, no shuffle, no learning, the caller's batches."""
    return make_private(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        dataset_size=max(expected_batch_size, 1),
        expected_batch_size=expected_batch_size,
        num_steps=MOST_RELEASES,
        noise_multiplier=0.0,
        delta=1e-5,
        clip=clip,
        clip_norm=clip_norm,
        batch_clip_norm=batch_clip_norm,
        sampling="unaccounted",
        shuffle="off",
        seed=0,
        strategy=strategy,
        check_rate=1.0,
    )


def check_sensitivity(private: PrivateTraining, records: Records) -> CheckReport:
    """Replay every record's removal, alone and within the batch, and the four invariants.

    The model should be in evaluation mode or free of dropout; randomness is replayed anyway.
    """
    started = time.perf_counter()
    replay = Replay(private, records)
    everyone = range(len(records.examples))
    whole = replay.release(everyone)
    checked = private.engine.num_checked
    alone = [replay.release([i]) for i in everyone]
    without = [replay.release([j for j in everyone if j != i]) for i in everyone]
    checks = [
        _bounded(replay, "one record alone", alone),
        _bounded(
            replay,
            "removal from the batch",
            [_minus(whole, rest) for rest in without],
            rounded=joint_norm(whole),
        ),
        _equal("batch split in parts", replay.release(everyone, part_size=2), whole, replay.dtype),
        Check(
            name="nothing carried over",
            measured=joint_norm(replay.release([])),
            allowed=0.0,
            detail="norm of the release of an empty batch",
        ),
        *_block_checks(replay, whole, alone),
        Check(
            name="records of the batch run alone",
            measured=0.0,
            allowed=0.0,
            detail=f"disagreements among {checked}, by autograd alone; any would have stopped here",
        ),
    ]
    plan = private.plan
    return CheckReport(
        unit="sensitivity of one step",
        setting={
            "strategy": private.engine.strategy,
            "clip": plan.clip,
            "clip_norm": plan.clip_norm,
            "batch_clip_norm": max((b.batch_clip_norm or 0.0) for b in plan.blocks) or None,
            "expected_batch_size": plan.expected_batch_size,
            "num_records": len(records.examples),
            "dtype": str(replay.dtype),
        },
        checks=tuple(checks),
        seconds=time.perf_counter() - started,
    )


def joint_norm(sums: Mapping[str, torch.Tensor]) -> float:
    """Euclidean norm over all tensors together, nan if anything is not finite."""
    squares = [float(tensor.double().square().sum()) for tensor in sums.values()]
    total = math.fsum(squares)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def _bounded(replay: Replay, name: str, moves: Sequence[Sums], *, rounded: float = 0.0) -> Check:
    """Every move is at most clip_norm; reported in units of it.

    A difference of two sums also carries the rounding of those sums, of norm `rounded`.
    """
    clip_norm = replay.private.plan.clip_norm
    norms = [joint_norm(move) / clip_norm for move in moves]
    worst = max(range(len(norms)), key=lambda i: math.inf if math.isnan(norms[i]) else norms[i])
    slack = SENSITIVITY_SLACK + 4.0 * torch.finfo(replay.dtype).eps * rounded / clip_norm
    return Check(
        name=name,
        measured=norms[worst],
        allowed=1.0 + slack,
        detail=f"‖difference‖ / clip_norm, worst of {len(norms)}: record {worst}",
    )


def _block_checks(replay: Replay, whole: Sums, alone: Sequence[Sums]) -> list[Check]:
    """Blocks with a batch clip obey it; blocks without one add up over records."""
    checks = []
    for block in replay.private.plan.blocks:
        part = {name: whole[name] for name in block.parameters}
        expected = {name: sum((one[name] for one in alone), torch.zeros(())) for name in part}
        limit, norm = block.batch_clip_norm, joint_norm(expected)
        name = f"block {block.name}: sum over records"
        if limit is not None:
            name = f"block {block.name}: batch clip of the sum"
            factor = min(1.0, limit / norm) if norm else 1.0
            expected = {key: tensor * factor for key, tensor in expected.items()}
        checks.append(_equal(name, part, expected, replay.dtype))
    return checks


def _equal(name: str, found: Sums, expected: Sums, dtype: torch.dtype) -> Check:
    """Relative distance within what the dtype's rounding explains."""
    return Check(
        name=name,
        measured=joint_norm(_minus(found, expected)) / max(joint_norm(expected), 1e-12),
        allowed=ROUNDING[dtype],
        detail=f"relative distance in {dtype}",
    )


def _minus(left: Sums, right: Sums) -> Sums:
    return {name: left[name] - right[name] for name in left}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point inputs in the model's own precision."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
