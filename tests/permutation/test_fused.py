"""The fused kernels move exactly what plain indexing moves.

On a GPU they are compiled; where only Triton's interpreter is at hand, they run in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from permutation.zoo import FAMILIES
from shuffled_dpsgd.permutation import apply, apply_to_tensors, discover, draw, fused

TESTS = Path(__file__).resolve().parents[1]

INTERPRETED = """
import torch
from permutation.zoo import FAMILIES
from shuffled_dpsgd.permutation import apply_to_tensors, discover, draw, fused

for family in ("gpt2", "vit", "llama"):
    for scope in ("paper", "full"):
        for dtype in (torch.float32, torch.bfloat16):
            model = FAMILIES[family]().model.to(dtype)
            spec = discover(model, scope=scope)
            permutation = draw(spec, torch.Generator().manual_seed(0))
            moved = {n: p.detach() for n, p in model.named_parameters() if n in spec.axes_of}
            expected = {n: t.clone() for n, t in moved.items()}
            apply_to_tensors(permutation, expected)
            fused.move(permutation, list(moved.items()))
            assert all(torch.equal(moved[n], expected[n]) for n in moved)
"""


def test_interpreted_kernels_agree_with_indexing() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
def test_compiled_kernels_agree_with_indexing(family: str, dtype: torch.dtype) -> None:
    assert fused.kernels() is not None
    model = FAMILIES[family]().model.to("cuda", dtype)
    spec = discover(model, scope="full")
    generator = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(5):
        permutation = draw(spec, generator)
        expected = {n: p.detach().cpu() for n, p in model.named_parameters()}
        apply_to_tensors(permutation.to("cpu"), expected)
        apply(permutation, model)
        assert all(torch.equal(p.cpu(), expected[n]) for n, p in model.named_parameters())


@pytest.mark.gpu
def test_a_shuffle_never_waits_for_the_device() -> None:
    model = FAMILIES["gpt2"]().model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    spec = discover(model, scope="full")
    generator = torch.Generator(device="cuda").manual_seed(0)
    apply(draw(spec, generator), model, optimizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply(draw(spec, generator), model, optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_tensor_of_the_families_is_served() -> None:
    for build in FAMILIES.values():
        for scope in ("paper", "full"):
            spec = discover(build().model, scope=scope)
            assert all(fused.matrix_shape(spec, name) for name in spec.axes_of)


def test_the_temporary_is_no_larger_than_the_largest_tensor() -> None:
    spec = discover(FAMILIES["bert"]().model, scope="full")
    names = tuple(spec.axes_of)
    plan = fused._plan(spec, names, 4, torch.device("cpu"))
    largest = max(torch.Size(shape).numel() for shape in spec.shapes.values())
    assert 0 < plan.temporary_elements <= largest
    assert plan.jobs.shape == (len(names), 5)
