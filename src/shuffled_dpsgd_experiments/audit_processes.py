"""Audits that consist of many whole runs, shared among processes on one device.

Every process takes numbers of its own and stops at a time fixed beforehand. Which runs are made
depends on the clock and on nothing that was read from them, so bounds keep their level.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.black_box import BlackBoxRuns, BlackBoxSetting, Start, gather_seeds
from shuffled_dpsgd.auditing.repeated_runs import RepeatedRuns, RepeatedSetting, gather_runs
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd_experiments.audited import prepared_task, starts_of, target_of


@dataclass(frozen=True, kw_only=True)
class Share:
    """Some of the runs of an audit: their numbers, and until when one may still begin."""

    config: RunConfig
    setting: BlackBoxSetting | RepeatedSetting
    numbers: tuple[int, ...]
    until: float
    fit_steps: int


def run_share(share: Share) -> list[Any]:
    """The runs of one process, in order, as far as the time goes."""
    run: Callable[[int], Any]
    task = prepared_task(share.config, fit_steps=share.fit_steps)
    start = starts_of(share.config, task.model)
    if isinstance(share.setting, BlackBoxSetting):
        collate = task.collate or default_collate
        run = BlackBoxRuns(start, task.train_data, task.losses, share.setting, collate=collate).run
    else:
        target = target_of(share.config, task)
        run = RepeatedRuns(target, partial(_shuffled, start), share.setting).run
    found = []
    for number in share.numbers:
        if time.time() > share.until:
            break
        found.append(run(number))
        print(f"run {number} done", file=sys.stderr, flush=True)
    return found


def black_box(
    config: RunConfig,
    setting: BlackBoxSetting,
    *,
    processes: int,
    max_seconds: float | None,
    fit_steps: int = 0,
) -> dict[str, Any]:
    """Repeated runs with the shuffle and without, attacked by their losses."""
    started = time.perf_counter()
    found = _shared(config, setting, setting.num_seeds, processes, max_seconds, fit_steps)
    return gather_seeds(found, setting, seconds=time.perf_counter() - started).to_json()


def repeated_runs(
    config: RunConfig,
    setting: RepeatedSetting,
    *,
    processes: int,
    max_seconds: float | None,
    fit_steps: int = 0,
) -> dict[str, Any]:
    """Whole runs with one canary and without."""
    started = time.perf_counter()
    found = _shared(config, setting, setting.num_runs, processes, max_seconds, fit_steps)
    return gather_runs(found, setting, seconds=time.perf_counter() - started).to_json()


def _shared(
    config: RunConfig,
    setting: BlackBoxSetting | RepeatedSetting,
    count: int,
    processes: int,
    max_seconds: float | None,
    fit_steps: int,
) -> list[Any]:
    until = time.time() + (1e9 if max_seconds is None else max_seconds)
    shares = [
        Share(
            config=config,
            setting=setting,
            numbers=tuple(range(count))[first::processes],
            until=until,
            fit_steps=fit_steps,
        )
        for first in range(processes)
    ]
    if processes == 1:
        return run_share(shares[0])
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(run_share, share) for share in shares]
        return [one for done in as_completed(pending) for one in done.result()]


def _shuffled(start: Start, dataset_size: int, seed: int) -> PrivateTraining:
    return start(dataset_size, seed, "every-step", "shuffled")
