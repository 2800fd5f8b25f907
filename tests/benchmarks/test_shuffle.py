"""The shuffle benchmark measures every part of a small model's shuffle."""

from __future__ import annotations

import torch

from benchmarks import shuffle


def test_every_part_is_measured() -> None:
    tiny = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    found = shuffle.shuffle_model("gpt2", torch.device("cpu"), 1, tiny)
    assert found["shuffle_ratio"] == 1.0
    for part in ("draw", "weights", "weights_and_state"):
        times = found[f"{part}_seconds"]
        assert 0 < times["host"] <= times["done"]
