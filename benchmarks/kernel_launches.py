"""Compiles every GPU kernel as its launches would, without a GPU and without launching.

    PYTHONPATH=<folder of one Triton> python -m benchmarks.kernel_launches --chips 80 90

Run by `benchmarks.compile_kernels`, once for each release of Triton. The functions that launch
kernels are called with tensors on the CPU, and what Triton would launch is compiled for a chip
instead. So arguments, alignment and options are those of real launches. Each compilation is a line
of JSON on the standard output.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KERNELS = "shuffled_dpsgd.clipping.kernels"
ANY_CHIP, COPY_ENGINE, HOPPER = (80, 89, 90, 100), (90, 100), (90,)
# Shared memory that one program may have, in bytes (CUDA C++ programming guide).
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
B = 2


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A call that launches kernels, and the chips they serve."""

    name: str
    run: Callable[[], object]
    chips: tuple[int, ...] = ANY_CHIP


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def linear_launches() -> Iterator[Launch]:
    linear, gram, wide, tiles, sums, rows = (
        importlib.import_module(f"{KERNELS}.triton.{name}")
        for name in ("linear", "gram", "wide", "tiles", "sums", "rows")
    )
    for T, D, P in ((128, 768, 3072), (300, 72, 136)):
        x, g = [empty(B, T, D)] * 2, [empty(B, T, P)] * 2
        at = f"T={T}, {D} to {P}"
        yield Launch(name=at, run=lambda x=x, g=g: linear.gram_sq_norms(x, g, True))
        yield Launch(name=at, run=lambda x=x, g=g: tiles.tile_sq_norms(x, g, True))
    for T in (192, 197):
        x, g = [empty(B, T, 768)], [empty(B, T, 768)]
        yield Launch(name=f"T={T}", run=lambda x=x, g=g: gram.gram_sq_norms(x, g, True))
    for T in (128, 300):
        x, g = empty(B, T, 768), empty(B, T, 50304)[..., :50257]
        yield Launch(name=f"T={T}", run=lambda x=x, g=g: wide.gram_sq_norms(x, g, False))
    for T, D, P in ((128, 768, 3072), (197, 768, 768), (37, 72, 136)):
        x, g, out = empty(B, T, D), empty(B, T, P), floats(P, D)
        for bulk, chips in ((False, ANY_CHIP), (True, COPY_ENGINE)):
            yield Launch(
                name=f"T={T}, {D} to {P}",
                run=lambda x=x, g=g, out=out, bulk=bulk: sums.weighted_outer_sums(
                    [x], [g], floats(B), [out], bulk=bulk
                ),
                chips=chips,
            )
    g = empty(B, 128, 768)
    yield Launch(name="biases", run=lambda: rows.weighted_row_sums([g], floats(B), [floats(768)]))
    float32_g = floats(B, 128, 768)
    yield Launch(
        name="float32 biases",
        run=lambda: rows.weighted_row_sums([float32_g], floats(B), [floats(768)]),
    )
    yield Launch(
        name="stored",
        run=lambda: rows.weighted_stored_sum(floats(B, 1 << 16), floats(B), floats(1 << 16)),
    )


def split_launches() -> Iterator[Launch]:
    """Float32 on tensor cores; sums of halves have factors by layer."""
    halves, split_gram, sums = (
        importlib.import_module(f"{KERNELS}.triton.{name}")
        for name in ("halves", "split_gram", "sums")
    )
    for T, D, P in ((128, 768, 3072), (300, 72, 136), (37, 768, 50257)):
        x, g = [floats(B, T, D)] * 2, [floats(B, T, P)] * 2

        def norms(x: list[Tensor] = x, g: list[Tensor] = g) -> None:
            x_halves, g_halves = halves.split(x, low_first=True), halves.split(g, low_first=False)
            split_gram.gram_sq_norms(x_halves, g_halves, True)

        yield Launch(name=f"T={T}, {D} to {P}", run=norms)
    x_half, g_half = (empty(B, 256, 768, dtype=torch.float16) for _ in range(2))
    for bulk, chips in ((False, ANY_CHIP), (True, COPY_ENGINE)):
        yield Launch(
            name="sums of halves",
            run=lambda bulk=bulk: sums.weighted_outer_sums(
                [x_half], [g_half], floats(1, B), [floats(768, 768)], bulk=bulk
            ),
            chips=chips,
        )


def gluon_launches() -> Iterator[Launch]:
    squares, strips, weighted_sums = (
        importlib.import_module(f"{KERNELS}.gluon.{name}")
        for name in ("squares", "strips", "weighted_sums")
    )
    for T, D, P in ((128, 768, 3072), (197, 768, 768), (300, 72, 136)):
        x, g = [empty(B, T, D)], [empty(B, T, P)]
        at = f"T={T}, {D} to {P}"
        for bias in (False, True):
            yield Launch(
                name=at,
                run=lambda x=x, g=g, bias=bias: squares.tile_sq_norms(x, g, bias),
                chips=HOPPER,
            )
            yield Launch(
                name=at,
                run=lambda x=x, g=g, bias=bias, D=D, P=P: weighted_sums.weighted_outer_sums(
                    x, g, floats(B), [floats(P, D)], True, [floats(P)] if bias else []
                ),
                chips=HOPPER,
            )
    x_half, g_half = (empty(B, 256, 768, dtype=torch.float16) for _ in range(2))
    yield Launch(
        name="sums of halves",
        run=lambda: weighted_sums.weighted_outer_sums(
            [x_half], [g_half], floats(1, B), [floats(768, 768)], True
        ),
        chips=HOPPER,
    )
    x, g, stored = [empty(B, 128, 768)], [empty(B, 128, 512)], [floats(B, 512, 768)]
    yield Launch(
        name="stored", run=lambda: squares.tile_sq_norms(x, g, False, stored), chips=HOPPER
    )
    for T in (192, 197):
        x_T, g_T = [empty(B, T, 768)], [empty(B, T, 768)]
        yield Launch(
            name=f"T={T}",
            run=lambda x=x_T, g=g_T: strips.gram_sq_norms(x, g, True),
            chips=HOPPER,
        )


def other_launches() -> Iterator[Launch]:
    """Norm layers, tables, casts and noise."""
    norms, tables, casts = (
        importlib.import_module(f"{KERNELS}.triton.{name}") for name in ("norms", "tables", "casts")
    )
    for D, centred in ((768, True), (4096, False)):
        yield Launch(
            name=f"D={D}",
            run=lambda D=D, centred=centred: norms.norm_sums(
                [floats(B, 128, D)], [empty(B, 128, D)], 1e-5, centred
            ),
        )
    ids = torch.zeros(B, 300, dtype=torch.int64)
    x, head, ge = empty(B, 300, 768), empty(B, 300, 1000), floats(B, 300, 768)
    for run in (
        lambda: tables.embedding_sq_norms(ids, ge, 1),
        lambda: tables.weighted_embedding_sum(ids, ge, floats(B), 1, floats(1000, 768)),
        lambda: tables.stored_cross_terms(floats(B, 1000, 768), ids, ge, 1),
        lambda: tables.tied_cross_terms(x, head, ids, ge, 1),
    ):
        yield Launch(name="padding", run=run)
    yield Launch(name="weights", run=lambda: casts.copy_all([empty(5000)], [floats(5000)]))
    from shuffled_dpsgd.core.noise import Place

    noise = importlib.import_module("shuffled_dpsgd.training.triton_noise")
    yield Launch(
        name="sums",
        run=lambda: noise.add_normal_(
            floats(9000), key=bytes(32), place=Place(0, 700), std=1.0, divide_by=2.0
        ),
    )


def shuffle_launches() -> Iterator[Launch]:
    """Drawing, and moving matrices along both axes."""
    from shuffled_dpsgd.permutation.move import fused, kernel_route
    from shuffled_dpsgd.permutation.move.drawing import fused_drawing

    cpu = torch.device("cpu")
    for rows, cols, dtype in ((768, 3072, torch.bfloat16), (40, 24, torch.float64)):
        spec = kernel_route.small_spec(rows, cols)
        drawing = fused_drawing(spec, cpu, kernel_route.kernels())
        yield Launch(name=f"{rows}x{cols}", run=drawing.recording.run)
        pairs = [(name, empty(*shape, dtype=dtype)) for name, shape in spec.shapes.items()]
        prepared = fused.prepare(spec, pairs)
        yield Launch(name=f"{rows}x{cols}, {dtype}", run=prepared.recording.run)


FAMILIES = {
    "linear": linear_launches,
    "split": split_launches,
    "gluon": gluon_launches,
    "other": other_launches,
    "shuffle": shuffle_launches,
}


class Compiler:
    """Stands in for the GPU: what is launched is compiled for `chip` and noted."""

    def __init__(self) -> None:
        self.chip = 0
        self.compiled: list[dict[str, Any]] = []
        driver.set_active(
            SimpleNamespace(
                get_current_device=lambda: self.chip,
                get_current_stream=lambda device: 0,
                get_current_target=lambda: GPUTarget("cuda", self.chip, 32),
            )
        )
        limits = importlib.import_module(f"{KERNELS}.triton.device_limits")
        limits.shared_bytes = lambda device: SHARED_BYTES[self.chip]
        self._run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **given: self._compile(kernel, *args, **given)

    def _compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        note = {"kernel": name_of(kernel), "chip": self.chip, "error": None}
        begin = time.perf_counter()
        try:
            found = self._run(kernel, *args, grid=grid, warmup=True, **options)
            shared = int(found.metadata.shared)
            if shared > SHARED_BYTES[self.chip]:
                note["error"] = f"{shared >> 10} KiB of shared memory"
        except Exception as error:
            note["error"] = reason_of(error)
        self.compiled.append(note | {"seconds": round(time.perf_counter() - begin, 2)})


def reason_of(error: BaseException) -> str:
    """The innermost of an error and its causes, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[-300:]


def name_of(kernel: Any) -> str:
    """The module of a kernel, in short, and its name."""
    parts = kernel.fn.__module__.split(".")
    return ".".join([*parts[-2:], kernel.fn.__name__])


def entry_kernels() -> set[str]:
    """Every kernel that is launched, and not called by another, in the modules imported so far."""
    modules = [m for name, m in sys.modules.items() if name.startswith("shuffled_dpsgd")]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    source = {kernel: inspect.getsource(kernel.fn) for kernel in found}
    called = {
        kernel
        for kernel in found
        if any(
            f"{kernel.fn.__name__}(" in text or f"({kernel.fn.__name__}," in text
            for other, text in source.items()
            if other is not kernel
        )
    }
    return {name_of(kernel) for kernel in found - called}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", type=int, nargs="+", default=list(ANY_CHIP))
    parser.add_argument("--only", choices=[*FAMILIES], nargs="+", default=[*FAMILIES])
    options = parser.parse_args()
    chips = options.chips
    compiler = Compiler()
    print(json.dumps({"triton": triton.__version__, "torch": torch.__version__}), flush=True)
    launches = [launch for family in options.only for launch in FAMILIES[family]()]
    seen = set()
    for chip in chips:
        compiler.chip = chip
        for launch in launches:
            if chip not in launch.chips:
                continue
            compiler.compiled.clear()
            launch.run()
            for note in compiler.compiled:
                seen.add(note["kernel"])
                print(json.dumps({"launch": launch.name, **note}), flush=True)
    complete = {*options.only} == {*FAMILIES} and {*chips} >= {*ANY_CHIP}
    for kernel in sorted(entry_kernels() - seen) if complete else []:
        note = {"kernel": kernel, "chip": chips[0], "error": "no launch compiles it", "seconds": 0}
        print(json.dumps({"launch": "", **note}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
