"""The options that every pre-training script has."""

from __future__ import annotations

import argparse
from pathlib import Path


def make_parser(
    name: str,
    description: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    batch_size: int,
    epochs: int,
) -> argparse.ArgumentParser:
    """A parser of the common options, with these defaults."""
    found = argparse.ArgumentParser(prog=name, description=description)
    add = found.add_argument
    add("--out", required=True, type=Path, help="folder for the checkpoint and pretraining.json")
    add("--hidden", type=int, default=hidden)
    add("--layers", type=int, default=layers)
    add("--heads", type=int, default=heads)
    add("--batch-size", type=int, default=batch_size)
    add("--learning-rate", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--epochs", type=int, default=epochs)
    add("--seconds", type=float, default=200.0, help="stop training after so long")
    add("--max-records", type=int, default=None, help="use at most so many, for a trial")
    add("--seed", type=int, default=0)
    add("--stored", choices=("float32", "bf16"), default="float32", help="bf16 halves the files")
    add("--device", default="auto")
    return found
