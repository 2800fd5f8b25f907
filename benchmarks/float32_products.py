"""Norms and sums of float32 linear layers on a GPU: how exact and how fast each way is.

    python -m benchmarks.float32_products --json benchmarks/reports/NAME.json

Ways: products split over tensor cores, plain float32 (norms in float64), and for the sums TF32, as
plain training forms its weight gradients. Errors are relative to float64, on a few samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels import milliseconds, relative_error
from benchmarks.results import environment
from shuffled_dpsgd.clipping.kernels import plain, split_products

# (name, layers, batch, tokens, inputs, outputs)
SHAPES = (
    ("gpt2 c_attn", 12, 32, 128, 768, 2304),
    ("gpt2 c_proj", 12, 32, 128, 768, 768),
    ("gpt2 c_fc", 12, 32, 128, 768, 3072),
    ("gpt2 mlp c_proj", 12, 32, 128, 3072, 768),
    ("gpt2 head", 1, 32, 128, 768, 50257),
)
TINY = (("tiny", 2, 3, 16, 32, 48),)
CHECKED = 4
Pairs = list[tuple[Tensor, Tensor]]
Way = Callable[[Pairs, Tensor, list[Tensor]], None]


def split_sums(pairs: Pairs, factors: Tensor, outs: list[Tensor]) -> None:
    split_products.add_outer_sums(pairs, factors, outs, False)


def plain_sums(pairs: Pairs, factors: Tensor, outs: list[Tensor]) -> None:
    for (x, g), out in zip(pairs, outs, strict=True):
        plain.weighted_outer_sum(x, g, factors, out.zero_())


def tf32_sums(pairs: Pairs, factors: Tensor, outs: list[Tensor]) -> None:
    """What plain training does, but for the factors; a tenth of float32's digits."""
    torch.set_float32_matmul_precision("high")
    for (x, g), out in zip(pairs, outs, strict=True):
        torch.mm((g * factors[:, None, None]).flatten(0, 1).mT, x.flatten(0, 1), out=out)
    torch.set_float32_matmul_precision("highest")


def both_split(pairs: Pairs, factors: Tensor, outs: list[Tensor]) -> None:
    """Norms and sums, with halves made once."""
    with split_products.keeping_halves():
        split_products.gram_sq_norms(pairs, False)
        split_products.add_outer_sums(pairs, factors, outs, False)


NORMS: dict[str, Callable[[Pairs], list[Tensor]]] = {
    "split": lambda pairs: split_products.gram_sq_norms(pairs, False),
    "plain": lambda pairs: [plain.gram_sq_norms(x, g, False) for x, g in pairs],
}
SUMS: dict[str, Way] = {"split": split_sums, "plain": plain_sums, "tf32": tf32_sums}


def measured(
    name: str, layers: int, B: int, T: int, D: int, P: int, device: torch.device
) -> dict[str, object]:
    """All ways on one shape."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(B, T, width, generator=generator, device=device)

    pairs = [(draw(D), draw(P)) for _ in range(layers)]
    factors = torch.rand(B, generator=generator, device=device)
    outs = [torch.empty(P, D, device=device) for _ in pairs]
    few = [(x[:CHECKED], g[:CHECKED]) for x, g in pairs[:1]]
    (x, g), weights = few[0], factors[:CHECKED]
    norms = plain.tile_sq_norms(x.double(), g.double(), False).sqrt()
    exact = plain.weighted_outer_sum(x.double(), g.double(), weights.double())
    found: dict[str, object] = {"name": name, "layers": layers, "shape": [B, T, D, P]}
    for way, find in NORMS.items():
        error = find(few)[0].double().sqrt() / norms - 1
        found[f"{way}_norm_errors"] = [float(error.min()), float(error.max())]
        found[f"{way}_norms_ms"] = _time(lambda find=find: find(pairs), device)
    for way, add in SUMS.items():
        add(few, weights, outs[:1])
        found[f"{way}_sum_error"] = relative_error(outs[0], exact)
        found[f"{way}_sums_ms"] = _time(lambda add=add: add(pairs, factors, outs), device)
    found["split_both_ms"] = _time(lambda: both_split(pairs, factors, outs), device)
    return found


def _time(run: Callable[[], object], device: torch.device) -> float | None:
    return milliseconds(run) if device.type == "cuda" else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try it out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results = []
    for shape in TINY if options.tiny else SHAPES:
        results.append(measured(*shape, device))
        print(json.dumps(results[-1]), flush=True)
        if options.json is not None:
            facts = environment(device, bfloat16=False)
            options.json.write_text(
                json.dumps({"environment": facts, "results": results}, indent=1) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
