"""Times the shuffle: one large matrix three ways, whole models, and its share of a training step.

    python -m benchmarks.shuffle --output benchmarks/reports

Writes a JSON file and a Markdown report. Full sizes on a GPU; on a CPU small ones, unless --full.
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

from benchmarks.results import environment
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.permutation import Permutation, PermutationSpec, apply, discover, draw, gpu
from shuffled_dpsgd.permutation.moving import gather_
from shuffled_dpsgd_experiments.tables.table7 import ways_to_shuffle

MODELS = ("vit-base", "bert-base", "gpt2", "gpt2-large")
SMALL = {"n_embd": 256, "n_layer": 2, "n_head": 4}
MIB = 1 << 20


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median seconds of one call, each call waited for, after one that does not count."""
    return host_and_total_seconds(run, device, repeats=repeats)[1]


def host_and_total_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int
) -> tuple[float, float]:
    """Median seconds until a call returns, and until its work on the device is done."""
    run()
    synchronise(device)
    returned, done = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        returned.append(time.perf_counter() - start)
        synchronise(device)
        done.append(time.perf_counter() - start)
    return statistics.median(returned), statistics.median(done)


def shuffle_matrix(device: torch.device, size: int, repeats: int) -> dict[str, Any]:
    """Rows and columns of a square matrix, as the paper's Table 7 times it."""
    matrix, order, ways = ways_to_shuffle(device, size)
    expected = matrix[order[0]][:, order[1]]
    for name, way in ways.items():
        if not torch.allclose(way(), expected):
            raise RuntimeError(f"{name} does not permute the matrix as indexing does")
    found: dict[str, Any] = {"size": size}
    for name, way in ways.items():
        found[name] = seconds(way, device, repeats=repeats)
    axes = list(enumerate(order))
    found["index in place"] = seconds(lambda: gather_(matrix, axes), device, repeats=repeats)
    return found


@contextmanager
def trained(name: str, device: torch.device, **settings: int) -> Iterator[tuple[Any, Any]]:
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
    """Draw and apply to weights and AdamW moments; time and extra memory."""
    with trained(name, device, **settings) as (model, optimizer):
        spec = discover(model, scope="full")
        generator = torch.Generator(device=device).manual_seed(0)
        parameters = list(model.parameters())
        tensors = [*parameters, *(t for s in optimizer.state.values() for t in s.values())]
        found: dict[str, Any] = {
            "model": name,
            "parameters": spec.total_parameters,
            "shuffle_ratio": spec.shuffle_ratio,
            "moved_mib": sum(t.nbytes for t in tensors if t.ndim) / MIB,
            "largest_tensor_mib": max(p.nbytes for p in parameters) / MIB,
            "draw_seconds": seconds(lambda: draw(spec, generator), device, repeats=repeats),
        }
        permutation = draw(spec, generator)
        found["weights_seconds"] = seconds(
            lambda: apply(permutation, model), device, repeats=repeats
        )
        found["host_seconds"], found["weights_and_state_seconds"] = host_and_total_seconds(
            lambda: apply(permutation, model, optimizer), device, repeats=repeats
        )
        if device.type == "cuda":
            found["extra_mib"] = extra_memory(lambda: apply(permutation, model, optimizer)) / MIB
            with plain_indexing(permutation) as same:
                found["without_triton_seconds"] = seconds(
                    lambda: apply(same, model, optimizer), device, repeats=5
                )
            check_kernels(spec, model, generator)
        return found


@contextmanager
def plain_indexing(permutation: Permutation) -> Iterator[Permutation]:
    """The same permutation of a spec that has nothing prepared, while the kernels refuse all."""
    with mock.patch.object(gpu, "can_move", return_value=False):
        yield replace(permutation, spec=copy.deepcopy(permutation.spec))


def extra_memory(run: Callable[[], object]) -> int:
    """Bytes allocated at the peak beyond those allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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


def share_of_step(
    device: torch.device, batch_size: int, length: int, *, blocks: int, steps: int, **settings: int
) -> dict[str, Any]:
    """A non-private AdamW step with and without a shuffle after it, in turns.

    The host's speed drifts by more than a shuffle takes, so each block with shuffles is compared
    with its neighbour without them, which comes before it and after it by turns. A block has
    several steps, for the last shuffle of a block is waited for, where otherwise it runs beside the
    next step's launches; and there are many blocks, for the median of few is a matter of luck.
    """
    with trained("gpt2", device, **settings) as (model, optimizer):
        spec = discover(model, scope="full")
        generator = torch.Generator(device=device).manual_seed(0)
        vocabulary = model.config.vocab_size
        ids = torch.randint(vocabulary, (batch_size, length), device=device)

        def step(shuffle: bool) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if shuffle:
                start = time.perf_counter()
                apply(draw(spec, generator), model, optimizer)
                on_host.append(time.perf_counter() - start)

        plain, shuffled, on_host = [], [], []
        for block in range(blocks + 1):
            pair = ((False, plain), (True, shuffled))
            for shuffle, times in pair if block % 2 else pair[::-1]:
                synchronise(device)
                start = time.perf_counter()
                for _ in range(steps):
                    step(shuffle)
                synchronise(device)
                if block > 0:
                    times.append((time.perf_counter() - start) / steps)
        host, alone = host_and_total_seconds(
            lambda: apply(draw(spec, generator), model, optimizer), device, repeats=blocks * steps
        )
    without, with_shuffle = statistics.median(plain), statistics.median(shuffled)
    ratios = [after / before - 1 for before, after in zip(plain, shuffled, strict=True)]
    return {
        "batch": f"{batch_size}x{length}",
        "precision": "bfloat16 autocast" if device.type == "cuda" else "float32",
        "step_seconds": without,
        "step_and_shuffle_seconds": with_shuffle,
        "shuffle_host_seconds": host,
        "shuffle_alone_seconds": alone,
        "shuffle_host_in_loop_seconds": statistics.median(on_host),
        "block_ratios": ratios,
        "ratio_in_loop": statistics.median(ratios),
        "ratio_alone": alone / without,
    }


def measure(device: torch.device, *, full: bool) -> dict[str, Any]:
    repeats = 20 if device.type == "cuda" else 3
    small = {} if full else SMALL
    gpu = device.type == "cuda"
    # Sizes of a batch, and steps in a block.
    on_gpu = ((8, 128, 8), (32, 128, 8), (128, 128, 5))
    batches = on_gpu if gpu else ((8, 128, 1),) if full else ((4, 64, 1),)
    blocks = 24 if gpu else 12
    return {
        "environment": environment(device, bfloat16=gpu),
        "matrix": shuffle_matrix(device, 10_000 if full else 1_000, repeats),
        "models": [
            shuffle_model(name, device, repeats, small) for name in (MODELS if full else ("gpt2",))
        ],
        "steps": [
            share_of_step(device, size, length, blocks=blocks, steps=steps, **small)
            for size, length, steps in batches
        ],
    }


def render(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    env = found["environment"]
    present = {name: version for name, version in env["versions"].items() if version}
    versions = ", ".join(f"{name} {version}" for name, version in present.items())
    lines = [
        f"# Shuffle on {env['hardware']}, {env['date']}",
        "",
        f"Python {env['python']}, {versions}, {env['torch_threads']} CPU threads. Times are "
        "medians in milliseconds, each call waited for. Made by `python -m benchmarks.shuffle`.",
        "",
        f"## Rows and columns of a {found['matrix']['size']:,} x {found['matrix']['size']:,} "
        "float32 matrix",
        "",
        "| way | ms |",
        "|---|---|",
        *(f"| {n} | {1e3 * v:.3f} |" for n, v in found["matrix"].items() if n != "size"),
        "",
        "## Whole models, scope full, float32 weights and AdamW moments",
        "",
        "| model | parameters | moved MiB | largest tensor MiB | draw | weights | weights + state "
        "| of which on the host | without Triton | extra MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["models"]:
        plain = row.get("without_triton_seconds")
        extra = row.get("extra_mib")
        lines.append(
            f"| {row['model']} | {row['parameters']:,} | {row['moved_mib']:.0f} "
            f"| {row['largest_tensor_mib']:.1f} | {1e3 * row['draw_seconds']:.2f} "
            f"| {1e3 * row['weights_seconds']:.2f} | {1e3 * row['weights_and_state_seconds']:.2f} "
            f"| {1e3 * row['host_seconds']:.2f} "
            f"| {'' if plain is None else f'{1e3 * plain:.2f}'} "
            f"| {'' if extra is None else f'{extra:.1f}'} |"
        )
    lines += [
        "",
        "## Share of a non-private GPT-2 step (AdamW; draw, weights and moments every step)",
        "",
        "| batch | precision | step | step + shuffle | shuffle alone | of which on the host "
        "| on the host in the loop | in the loop, median (range of blocks) | alone |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['batch']} | {row['precision']} | {1e3 * row['step_seconds']:.2f} "
        f"| {1e3 * row['step_and_shuffle_seconds']:.2f} "
        f"| {1e3 * row['shuffle_alone_seconds']:.2f} | {1e3 * row['shuffle_host_seconds']:.2f} "
        f"| {1e3 * row['shuffle_host_in_loop_seconds']:.2f} | {row['ratio_in_loop']:+.1%} "
        f"({min(row['block_ratios']):+.1%} to {max(row['block_ratios']):+.1%}) "
        f"| {row['ratio_alone']:.1%} |"
        for row in found["steps"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/reports"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true", help="full sizes on a CPU too")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest")
    found = measure(device, full=options.full or device.type == "cuda")
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"shuffle-{device.type}-{found['environment']['date']}"
    (options.output / f"{stem}.json").write_text(json.dumps(found, indent=2) + "\n")
    report = render(found)
    (options.output / f"{stem}.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
