"""The generators everybody shares: taken down, and put back to where they were."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from shuffled_dpsgd.core.streams import Purpose, RandomStreams
from shuffled_dpsgd.runtime.random_states import seed_all


def global_randomness() -> dict[str, Any]:
    """The generators that dropout and data augmentation use; never those of noise or sampling."""
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
    """Put the generators back to where `global_randomness` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words), next_gauss))
    kind, keys, at, has_gauss, gauss = state["numpy"]
    words32 = keys.numpy().astype(np.uint32)
    np.random.set_state((kind, words32, at, has_gauss, gauss))  # noqa: NPY002


def seed_rank(rank: int) -> None:
    """From here on the generators of this rank go their own way; rank 0's stay as they are.

    Ranks that started alike would otherwise give their samples the same dropout masks.
    """
    if rank == 0:
        return
    drawn = int(torch.randint(2**62, ()))
    _begin_at(f"{drawn}:{rank}")


def seed_dropout(seed: int) -> None:
    """Have the shared generators follow the seed of a run, by a hash that does not show it."""
    _begin_at(f"dropout of a run:{seed}")


def _begin_at(label: str) -> None:
    seed_all(int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little"))


def loader_generator(
    streams: RandomStreams, purpose: Purpose, step: int, index: int = 0
) -> torch.Generator:
    """A torch generator on the CPU, for what privacy does not rest on: loaders, augmentation.

    It keeps 64 bits of the key at most, and is no cryptographic generator.
    """
    seed = int.from_bytes(streams.key(purpose, step, index)[:8], "little") >> 1
    return torch.Generator().manual_seed(seed)
