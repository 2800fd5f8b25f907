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

from shuffled_dpsgd.tasks.audited import prepared_task, target_of
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd_experiments.audits.black_box import (
    PRIVATE_ARMS,
    BlackBoxRuns,
    BlackBoxSetting,
    Start,
    gather_seeds,
)
from shuffled_dpsgd_experiments.audits.repeated_runs import (
    RepeatedRuns,
    RepeatedSetting,
    gather_runs,
)
from shuffled_dpsgd_experiments.audits.targets import starts_of


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
    target = target_of(share.config, task)
    if isinstance(share.setting, BlackBoxSetting):
        run = BlackBoxRuns(start, target, share.setting).run
    else:
        run = RepeatedRuns(target, partial(_shuffled, start), share.setting).run
    found = []
    for number in share.numbers:
        if time.time() > share.until:
            break
        found.append(run(number))
        print(f"run {number} done", file=sys.stderr, flush=True)
    return found


def make_runs(
    config: RunConfig,
    setting: BlackBoxSetting | RepeatedSetting,
    *,
    processes: int,
    max_seconds: float | None,
    fit_steps: int,
) -> list[Any]:
    """All runs of the setting, or as many as begin in time."""
    count = setting.num_seeds if isinstance(setting, BlackBoxSetting) else setting.num_runs
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


def report_runs(
    found: list[Any], setting: BlackBoxSetting | RepeatedSetting, *, seconds: float
) -> dict[str, Any]:
    """The report on the runs that were made."""
    if isinstance(setting, BlackBoxSetting):
        return gather_seeds(found, setting, seconds=seconds).to_json()
    return gather_runs(found, setting, seconds=seconds).to_json()


def _shuffled(start: Start, dataset_size: int, seed: int) -> PrivateTraining:
    return start(dataset_size, seed, PRIVATE_ARMS["on"])
