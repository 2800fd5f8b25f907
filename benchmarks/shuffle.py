"""Times the shuffle of whole models: drawing a permutation, moving weights and AdamW's moments.

    python -m benchmarks.shuffle --json benchmarks/reports/NAME.json

Full sizes on a GPU; on a CPU a small GPT-2, unless --full. What the shuffle adds to a whole step is
in `shuffled-dpsgd reproduce table8`, ways to shuffle one matrix are in `table7`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.results import environment, save
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.permutation import Permutation, PermutationSpec, apply, discover, draw, gpu

MODELS = ("vit-base", "bert-base", "gpt2", "gpt2-large")
SMALL = {"n_embd": 256, "n_layer": 2, "n_head": 4}
MIB = 1 << 20


def seconds(run: Callable[[], object], device: torch.device, *, repeats: int) -> dict[str, float]:
    """Medians until a call returns and until its work is done, after one that does not count."""
    returned, done = [], []
    for number in range(repeats + 1):
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:
            returned.append(host)
            done.append(time.perf_counter() - start)
    return {"host": statistics.median(returned), "done": statistics.median(done)}


@contextmanager
def trained(name: str, device: torch.device, settings: dict[str, int]) -> Iterator[tuple[Any, Any]]:
    """A model and its AdamW, whose state exists, as in the middle of training."""
    model = build_model(name, device=str(device), settings=settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    try:
        yield model, optimizer
    finally:
        del model, optimizer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def shuffle_model(
    name: str, device: torch.device, repeats: int, settings: dict[str, int]
) -> dict[str, Any]:
    """Seconds of each part, and on a GPU the extra memory and what plain indexing takes."""
    with trained(name, device, settings) as (model, optimizer):
        spec = discover(model, scope="full")
        generator = torch.Generator(device=device).manual_seed(0)
        tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        permutation = draw(spec, generator)

        def move(chosen: Permutation = permutation) -> None:
            apply(chosen, model, optimizer)

        found = {
            "model": name,
            "parameters": spec.total_parameters,
            "shuffle_ratio": spec.shuffle_ratio,
            "moved_mib": sum(t.nbytes for t in tensors if t.ndim) / MIB,
            "draw_seconds": seconds(lambda: draw(spec, generator), device, repeats=repeats),
            "weights_seconds": seconds(lambda: apply(permutation, model), device, repeats=repeats),
            "weights_and_state_seconds": seconds(move, device, repeats=repeats),
        }
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            move()
            torch.cuda.synchronize()
            found["extra_mib"] = (torch.cuda.max_memory_allocated() - before) / MIB
            with plain_indexing(permutation) as same:
                found["plain_indexing_seconds"] = seconds(lambda: move(same), device, repeats=5)
            check_kernels(spec, model, generator)
        return found


@contextmanager
def plain_indexing(permutation: Permutation) -> Iterator[Permutation]:
    """The same permutation of a spec that has nothing prepared, while the kernels refuse all."""
    with mock.patch.object(gpu, "can_move", return_value=False):
        yield replace(permutation, spec=copy.deepcopy(permutation.spec))


def check_kernels(spec: PermutationSpec, model: Any, generator: torch.Generator) -> None:
    """What the kernels move, plain indexing by the inverse puts back bit for bit."""
    before = [p.detach().clone() for p in model.parameters()]
    permutation = draw(spec, generator)
    apply(permutation, model)
    if all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)):
        raise RuntimeError("nothing moved")
    with plain_indexing(permutation.inverse()) as inverse:
        apply(inverse, model)
    if not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)):
        raise RuntimeError("the GPU kernels and plain indexing disagree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true", help="full sizes on a CPU too")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    device, on_gpu = torch.device(options.device), options.device.startswith("cuda")
    full = options.full or on_gpu
    models = []
    for name in MODELS if full else ("gpt2",):
        models.append(shuffle_model(name, device, 20 if on_gpu else 3, {} if full else SMALL))
        print(json.dumps(models[-1]), flush=True)
    if options.json:
        facts = environment(device, bfloat16=False)
        save(options.json, {"environment": facts, "models": models})


if __name__ == "__main__":
    main()
