"""Checks and times the kernels alone, on the shapes of real layers: a GPU's, or else a CPU's.

    python -m benchmarks.kernels

Each line gives the relative error against float64 and the time beside what plain torch needs (on a
CPU: beside the plain definition, and numpy's own normal numbers).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from shuffled_dpsgd.training.box_muller import standard_normal
from torch import Tensor

from benchmarks.results import environment
from shuffled_dpsgd.clipping import kernels
from shuffled_dpsgd.clipping.kernels import host, plain

# (name, layers, batch, tokens, inputs, outputs)
LINEAR_SHAPES = (
    ("gpt2 c_attn", 12, 32, 128, 768, 2304),
    ("gpt2 c_proj", 12, 32, 128, 768, 768),
    ("gpt2 c_fc", 12, 32, 128, 768, 3072),
    ("gpt2-large c_fc", 12, 32, 128, 1280, 5120),
    ("vit fc", 12, 128, 197, 768, 3072),
    ("vit query", 48, 128, 197, 768, 768),
    ("gpt2 c_fc long", 12, 8, 1024, 768, 3072),
)
# (name, batch, tokens, inputs, outputs)
HOST_SHAPES = (
    ("head of 8192 rows", 8, 64, 256, 8192),
    ("256 to 1024", 8, 64, 256, 1024),
    ("bert-base fc", 8, 128, 768, 3072),
)
NORMAL_NUMBERS = 1 << 22


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of one call by device events, after two warm-up calls."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check_linear(name: str, L: int, B: int, T: int, D: int, P: int) -> None:
    xs = [torch.randn(B, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(L)]
    gs = [torch.randn(B, T, P, device="cuda", dtype=torch.bfloat16) for _ in range(L)]
    factors = torch.rand(B, device="cuda")
    factors[0] = 0.0
    outs = [torch.zeros(P, D, device="cuda") for _ in range(L)]
    pairs = list(zip(xs, gs, strict=True))

    norms = kernels.gram_sq_norm_sums(pairs[:1], [True])[0]
    weights = torch.bmm(gs[0][:2].double().mT, xs[0][:2].double())
    expected = weights.square().sum((1, 2)) + gs[0][:2].double().sum(1).square().sum(1)
    norm_error = relative_error(norms[:2], expected)
    kernels.add_weighted_outer_sums(pairs[:1], factors, outs[:1])
    scaled = (gs[0].double() * factors.double()[:, None, None]).flatten(0, 1)
    sum_error = relative_error(outs[0], scaled.mT @ xs[0].double().flatten(0, 1))

    gram = milliseconds(lambda: kernels.gram_sq_norm_sums(pairs, [True] * L))
    tile = milliseconds(lambda: plain.tile_sq_norms(*pairs[0], True), 3) * L
    outer = milliseconds(lambda: kernels.add_weighted_outer_sums(pairs, factors, outs))
    flat = [(g.flatten(0, 1), x.flatten(0, 1)) for x, g in pairs]
    unscaled = milliseconds(lambda: [g.mT @ x for g, x in flat])
    tera = 2e-9 * L * B * T * D * P
    print(
        f"{name:18} Gram error {norm_error:.1e} {gram:7.3f} ms (tiles {tile:7.2f}) | sum error "
        f"{sum_error:.1e} {outer:7.3f} ms {tera / outer:5.0f} TFLOP/s (unscaled product "
        f"{unscaled:7.3f} ms {tera / unscaled:5.0f})",
        flush=True,
    )


def check_layer_norm(L: int, B: int, T: int, D: int) -> None:
    pairs = []
    for _ in range(L):
        x = torch.randn(B, T, D, device="cuda")
        pairs.append((x, torch.randn_like(x)))
    options = ([1e-5] * L, [True] * L)
    ((_, found),) = kernels.norm_sum_runs(pairs, *options)
    expected = plain.norm_sums(pairs[-1][0].double(), pairs[-1][1].double(), 1e-5, True)
    error = relative_error(found[-1], expected)
    ours = milliseconds(lambda: kernels.norm_sum_runs(pairs, *options))
    gigabytes = 8e-9 * L * B * T * D
    print(
        f"layer norms {L}x{B}x{T}x{D} error {error:.1e} {ours:.3f} ms "
        f"{1e3 * gigabytes / ours:.0f} GB/s",
        flush=True,
    )


def host_milliseconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median time of one call on the CPU, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


def check_host(name: str, B: int, T: int, D: int, P: int) -> None:
    x, g = torch.randn(B, T, D), torch.randn(B, T, P)
    expected = plain.gram_sq_norms(x.double(), g.double(), True)
    error = relative_error(host.gram_sq_norms([(x, g)], True)[0], expected)
    ours = host_milliseconds(lambda: host.gram_sq_norms([(x, g)], True))
    twice = host_milliseconds(lambda: plain.gram_sq_norms(x, g, True))
    print(f"{name:18} Gram error {error:.1e} {ours:7.2f} ms (plain {twice:7.2f})", flush=True)


def check_normal_numbers() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    draw = host_milliseconds(lambda: standard_normal(rng, NORMAL_NUMBERS, np.dtype(np.float32)))
    numpys = host_milliseconds(lambda: rng.standard_normal(NORMAL_NUMBERS, dtype=np.float32))
    each = 1e6 / NORMAL_NUMBERS
    print(f"normal numbers, one thread: {draw * each:.1f} ns each (numpy {numpys * each:.1f})")


def main() -> int:
    on_gpu = torch.cuda.is_available()
    print(environment(torch.device("cuda" if on_gpu else "cpu"), bfloat16=on_gpu))
    if not on_gpu:
        for host_shape in HOST_SHAPES:
            check_host(*host_shape)
        check_normal_numbers()
        return 0
    for shape in LINEAR_SHAPES:
        check_linear(*shape)
    check_layer_norm(25, 32, 128, 768)
    check_layer_norm(8, 128, 197, 768)
    return 0


if __name__ == "__main__":
    sys.exit(main())
