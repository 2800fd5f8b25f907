"""The JSON documents of the benchmarks: what ran where, and every measurement.

A document of `benchmarks.step` has `runs` (a name for each run of the command, with its
environment), `measurements` (each naming its run) and `notes`, remarks that whoever ran it may add.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.environment import machine, today, versions
from shuffled_dpsgd.runtime import backends

Document = dict[str, Any]


def environment(device: torch.device, *, bfloat16: bool) -> dict[str, object]:
    """What the numbers depend on; `backends` are those this process has taken so far."""
    return {
        "date": today(),
        **machine(str(device)),
        "torch_threads": torch.get_num_threads(),
        "versions": versions(("torch", "triton", "transformers", "opacus", "opake-dpsgd")),
        "bfloat16_autocast": bfloat16,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "backends": backends.report(),
    }


def new_run() -> str:
    """A name no other process gives its run."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{os.getpid()}"


def load(path: Path) -> Document:
    document: Document = json.loads(path.read_text())
    if "measurements" not in document:
        raise SystemExit(f"{path}: no measurements of `python -m benchmarks.step` in it")
    return document


def save(path: Path, document: Document) -> None:
    """Write all at once, for the process may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def add(path: Path, document: Document) -> None:
    """Save a document beside what the file already holds."""
    if path.exists():
        known = load(path)
        document = {
            **known,
            "runs": {**known["runs"], **document["runs"]},
            "measurements": known["measurements"] + document["measurements"],
        }
    save(path, document)
