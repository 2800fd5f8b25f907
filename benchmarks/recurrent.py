"""Clipped sums of recurrent layers: plain backward, this library, and Opacus' own layers.

    python -m benchmarks.recurrent --json benchmarks/reports/NAME.json

A model is one `nn.GRU`, `nn.LSTM` or `nn.RNN` and a linear map of the last state; Opacus has its
DPGRU, DPLSTM or DPRNN in its place. A step is forward, backward and the clipped sum, on a CPU. All
sides take turns, and ratios are formed within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.results import environment, save
from shuffled_dpsgd.clipping import ClippingEngine

ROUNDS, CLASSES = 9, 4
# Batch, time steps, inputs, units, layers, whether in both directions.
SHAPES = (
    (32, 20, 16, 32, 1, False),
    (64, 50, 32, 64, 1, False),
    (16, 100, 64, 128, 1, False),
    (64, 30, 64, 128, 2, False),
    (32, 30, 32, 64, 1, True),
)
Shape = tuple[int, int, int, int, int, bool]


class Classifier(nn.Module):
    """The last state of a recurrent layer, mapped to classes."""

    def __init__(self, kind: type[nn.Module], shape: Shape) -> None:
        super().__init__()
        _, _, inputs, units, layers, both = shape
        self.layer = kind(inputs, units, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(units * (1 + both), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def sides(kind: str, shape: Shape, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """One step of each side."""
    from opacus import GradSampleModule, layers

    plain, model = (Classifier(getattr(nn, kind), shape) for _ in range(2))
    engine = ClippingEngine(model, clip_norm=1.0)
    engine.__enter__()
    theirs = GradSampleModule(Classifier(getattr(layers, f"DP{kind}"), shape), loss_reduction="sum")

    def of_plain() -> None:
        plain.zero_grad()
        F.cross_entropy(plain(x), y, reduction="sum").backward()

    def of_ours() -> object:
        engine.reset()
        engine.backward(F.cross_entropy(model(x), y, reduction="none"))
        return engine.clipped_sum()

    def of_opacus() -> object:
        theirs.zero_grad()
        F.cross_entropy(theirs(x), y, reduction="sum").backward()
        samples = [parameter.grad_sample for parameter in theirs.parameters()]
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in samples]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        return [torch.einsum("i,i...", factors, each) for each in samples]

    return {"plain": of_plain, "ours": of_ours, "opacus": of_opacus}


def measure(kind: str, shape: Shape) -> dict[str, object]:
    """Median seconds of each side, and medians of the ratios within rounds."""
    torch.manual_seed(0)
    x, y = torch.randn(shape[0], shape[1], shape[2]), torch.randint(CLASSES, (shape[0],))
    steps, seconds = sides(kind, shape, x, y), []
    for number in range(ROUNDS + 2):
        taken = {}
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            taken[name] = time.perf_counter() - began
        if number >= 2:  # The first two rounds warm up.
            seconds.append(taken)
    ratios = {
        f"ours over {name}": statistics.median(each[name] / each["ours"] for each in seconds)
        for name in ("plain", "opacus")
    }
    medians = {name: statistics.median(each[name] for each in seconds) for name in steps}
    return {"layer": kind, "shape": shape, "seconds": medians, "throughput": ratios}


def main() -> None:
    """Measure every layer and shape, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found = [measure(kind, shape) for kind in ("GRU", "LSTM", "RNN") for shape in SHAPES]
    known = environment(torch.device("cpu"), bfloat16=False)
    fields = ["batch", "time steps", "inputs", "units", "layers", "both directions"]
    document = {"commit": given.commit, "environment": known, "shape": fields, "results": found}
    save(given.json, document)
    for each in found:
        print(each["layer"], each["shape"], each["throughput"])


if __name__ == "__main__":
    main()
