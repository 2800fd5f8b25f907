"""The JSON documents of `benchmarks.step`: what ran where, and every measurement.

A document has `runs` (a name for each run of the command, with its environment), `measurements`
(each naming its run) and `notes`, remarks that whoever ran the benchmark may add. Documents are
merged by putting them together; nothing of one run is ever compared with another's.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Measurement
from shuffled_dpsgd.environment import machine, today, versions
from shuffled_dpsgd.runtime import backends

Document = dict[str, Any]


def environment(device: torch.device, *, bfloat16: bool) -> dict[str, object]:
    """What the numbers depend on; `routes` are those this process has taken so far."""
    return {
        "date": today(),
        **machine(str(device)),
        "torch_threads": torch.get_num_threads(),
        "versions": versions(("torch", "triton", "transformers", "opacus")),
        "bfloat16_autocast": bfloat16,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "routes": backends.report(),
    }


def new_run() -> str:
    """A name no other process gives its run."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{os.getpid()}"


def document_of(
    run: str,
    environment: dict[str, object],
    measurements: Iterable[Measurement],
    routes_taken: dict[str, object],
) -> Document:
    return {
        "runs": {run: {**environment, "routes": routes_taken}},
        "notes": [],
        "measurements": [entry.to_json() for entry in measurements],
    }


def load(path: Path) -> Document:
    document: Document = json.loads(path.read_text())
    if "runs" not in document:
        raise SystemExit(f"{path}: no `runs` in it; measure again with `python -m benchmarks.step`")
    return document


def merge(documents: Iterable[Document]) -> Document:
    """All runs, notes and measurements; a run that comes again replaces its earlier state."""
    merged: Document = {"runs": {}, "notes": [], "measurements": []}
    for document in documents:
        kept = [e for e in merged["measurements"] if e["run"] not in document["runs"]]
        merged = {
            "runs": {**merged["runs"], **document["runs"]},
            "notes": list(dict.fromkeys([*merged["notes"], *document["notes"]])),
            "measurements": kept + document["measurements"],
        }
    return merged


def save(path: Path, document: Document) -> None:
    """Write all at once, for the process may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def add(path: Path, document: Document) -> None:
    """Save a document beside what the file already holds."""
    save(path, merge([load(path), document] if path.exists() else [document]))
