"""The global random generators of torch, NumPy and Python: saved, restored and seeded."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from shuffled_dpsgd.core.streams import Purpose, RandomStreams
from shuffled_dpsgd.runtime.random_states import seed_all


def global_randomness() -> dict[str, Any]:
    """The state of the generators that dropout and augmentation use, never of noise or sampling."""
    version, words, next_gauss = random.getstate()
    kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    words32 = np.asarray(keys, dtype=np.int64)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(words), next_gauss],
        "numpy": [kind, torch.from_numpy(words32), at, has_gauss, gauss],
    }


def set_global_randomness(state: dict[str, Any]) -> None:
    """Restore a state that `global_randomness` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words), next_gauss))
    kind, keys, at, has_gauss, gauss = state["numpy"]
    words32 = keys.numpy().astype(np.uint32)
    np.random.set_state((kind, words32, at, has_gauss, gauss))  # noqa: NPY002


def seed_rank(rank: int) -> None:
    """Give this rank's generators a seed of their own; those of rank 0 stay as they are.

    Ranks with equal states would otherwise apply the same dropout masks to different samples.
    """
    if rank == 0:
        return
    drawn = int(torch.randint(2**62, ()))
    _begin_at(f"{drawn}:{rank}")


def seed_dropout(seed: int) -> None:
    """Seed the global generators by a hash of the run's seed, which does not reveal it."""
    _begin_at(f"dropout of a run:{seed}")


def _begin_at(label: str) -> None:
    seed_all(int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little"))


def loader_generator(
    streams: RandomStreams, purpose: Purpose, step: int, index: int = 0
) -> torch.Generator:
    """A torch generator on the CPU for loaders and augmentation, on which no privacy rests.

    It is not cryptographic and uses at most 64 bits of the key.
    """
    seed = int.from_bytes(streams.key(purpose, step, index)[:8], "little") >> 1
    return torch.Generator().manual_seed(seed)
