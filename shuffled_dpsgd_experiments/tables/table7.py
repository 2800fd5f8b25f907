"""Table 7: one large matrix shuffled three ways, rows and columns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, in_one_file, origin_of
from shuffled_dpsgd_experiments.tables.printed import MATRIX_SHUFFLES

TITLE = "Table 7: ways to shuffle a matrix"
SIZES = {"demo": 1_000, "paper": 10_000}


def ways_to_shuffle(
    device: torch.device, size: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], dict[str, Callable[[], torch.Tensor]]]:
    """A random matrix, an order of its rows and of its columns, and functions that apply both."""
    matrix = torch.randn(size, size, device=device)
    rows, cols = torch.randperm(size, device=device), torch.randperm(size, device=device)
    dense = [torch.eye(size, device=device)[index] for index in (rows, cols)]
    sparse = [each.to_sparse() for each in dense]
    ways = {
        "index": lambda: matrix[rows][:, cols],
        "dense matmul": lambda: dense[0] @ matrix @ dense[1].T,
        "sparse matmul": lambda: (
            torch.sparse.mm(sparse[1], torch.sparse.mm(sparse[0], matrix).T.contiguous()).T
        ),
    }
    return matrix, (rows, cols), ways


def run(scale: str) -> dict[str, Any]:
    """Milliseconds of each way; every way is checked against indexing first."""
    device = chosen_device("auto")
    size = SIZES[scale]
    matrix, (rows, cols), ways = ways_to_shuffle(device, size)
    expected = matrix[rows][:, cols]
    for name, way in ways.items():
        if not torch.allclose(way(), expected):
            raise RuntimeError(f"{name} does not permute the matrix as indexing does")
    return {
        "scale": scale,
        "size": size,
        "milliseconds": {name: 1e3 * _median(way, device) for name, way in ways.items()},
        "environment": environment(str(device)),
    }


def _median(way: Callable[[], torch.Tensor], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def show(raw: dict[str, Any]) -> Exhibit:
    """Times, and whether the paper's order holds."""
    found = raw["milliseconds"]
    best = min(found, key=found.__getitem__)
    rows = []
    for name, printed in MATRIX_SHUFFLES.items():
        paper, ours = printed / MATRIX_SHUFFLES["index"], found[name] / found["index"]
        verdict = f"{ours:.3g} times indexing; the paper has {paper:.0f} times"
        if name == "index":
            verdict = "the fastest, as printed" if best == name else f"{best} was faster"
        rows.append(
            ExhibitRow(
                what=name, paper=f"{printed:g} ms", ours=f"{found[name]:.3f} ms", verdict=verdict
            )
        )
    return Exhibit(
        name="table7",
        title=TITLE,
        origin=f"Rows and columns of {raw['size']:,} × {raw['size']:,} float32. {origin_of(raw)}",
        rows=tuple(rows),
        notes=("The paper's times are of an RTX 3090 and 10,000 × 10,000; ratios compare.",),
    )


TABLE = in_one_file("table7", TITLE, run, show)
