"""Whether the Triton kernels draw and move permutations on a device, found by trying them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from shuffled_dpsgd.permutation.spec import Group, Member, PermutationSpec
from shuffled_dpsgd.runtime.backends import Backend, expect, triton_available

ROWS, COLS = 40, 24


def find_kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels if they serve on `device`, else None."""
    if device.type != "cuda" or not triton_available() or not BACKEND.serves(device):
        return None
    return kernels()


def kernels() -> ModuleType:
    """The Triton kernels, imported when first asked for."""
    return import_module("shuffled_dpsgd.permutation.move.triton_kernels")


def try_kernels(device: torch.device) -> None:
    """Draw a permutation of two small matrices and move them, bit for bit as indexing does."""
    from shuffled_dpsgd.permutation.move import fused
    from shuffled_dpsgd.permutation.move.drawing import fused_drawing

    spec = small_spec(ROWS, COLS)
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = [group.size for group in spec.groups]
    keys = torch.randint(2**62, (sum(sizes),), generator=generator, device="cpu")
    drawing = fused_drawing(spec, device, kernels())
    drawing.keys.copy_(keys)
    permutation = drawing.result()
    rows, cols = (part.argsort(stable=True) for part in keys.split(sizes))
    for parameter, first, second in (("up", rows, cols), ("down", cols, rows)):
        for axis, expected in enumerate((first, second)):
            drawn = permutation.index(parameter, axis).cpu()
            expect(torch.equal(drawn, expected), "a draw is not the order of its keys")
    up = torch.randn(ROWS, COLS, generator=generator, device="cpu", dtype=torch.float32)
    moved = up[rows][:, cols]
    tensors = {"up": up.to(device), "down": up.mT.contiguous().to(device)}
    fused.move(permutation, fused.prepare(spec, list(tensors.items())))
    for name, wanted in (("up", moved), ("down", moved.mT)):
        is_moved = torch.equal(tensors[name].cpu(), wanted)
        expect(is_moved, "a matrix is not moved as indexing moves it")


def small_spec(rows: int, cols: int) -> PermutationSpec:
    """Two matrices, one shaped as the other's transpose, that move along both axes."""
    groups = [
        Group(
            name=name,
            kind="mlp-hidden",
            size=size,
            members=(Member(parameter="up", axis=axis), Member(parameter="down", axis=1 - axis)),
        )
        for axis, (name, size) in enumerate([("rows", rows), ("columns", cols)])
    ]
    return PermutationSpec(
        scope="full",
        groups=tuple(groups),
        shapes={"up": (rows, cols), "down": (cols, rows)},
        unmoved={},
    )


BACKEND = Backend(
    name="Shuffling in Triton",
    package="shuffled_dpsgd.permutation.move",
    instead="Plain indexing serves",
    cost="every tensor takes launches and a temporary of its own",
    probe=try_kernels,
)
