"""The command under torchrun: every rank runs it, and rank 0 speaks. Nothing heavy is imported."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shuffled_dpsgd.distributed import World
    from shuffled_dpsgd.tasks import RunConfig


def joined(config: RunConfig) -> AbstractContextManager[World]:
    """The ranks of this launch, joined on the devices the configuration names."""
    from shuffled_dpsgd.distributed import launched

    return launched(config.training.device)


def rank() -> int | None:
    """Which of several processes a launcher says this is; None for a process alone."""
    size, number = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "")
    return int(number) if number.isdigit() and size.isdigit() and int(size) > 1 else None


def is_first_rank() -> bool:
    """Whether this process speaks to people."""
    return not rank()


def leave_launch() -> None:
    """Go on as a process alone, to plan and not to train: plans do not depend on the ranks."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def is_restart() -> bool:
    """Whether torchrun started this launch again after a rank had failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
