"""The GPU kernels move exactly what plain indexing moves.

On a GPU they are compiled; where only Triton's interpreter is at hand, they run in it. The
interpreter runs one program after another, so that programs do not share elements is tested apart.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from permutation.zoo import FAMILIES
from shuffled_dpsgd.permutation import (
    PermutationSpec,
    apply,
    apply_to_tensors,
    discover,
    draw,
    gpu,
)
from shuffled_dpsgd.permutation.gpu import (
    Launch,
    MatrixShape,
    _num_warps,
    _tile_of,
    probe_kernels,
)
from shuffled_dpsgd.runtime.backends import WrongResult
from waiting import waiting_is_an_error

TESTS = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")

# Size of a program, family, scope and type: large programs and small ones, of which a matrix takes
# several.
CASES = {
    "large programs": (None, "gpt2", "full", torch.bfloat16),
    "small programs": (256, "vit", "full", torch.bfloat16),
    "smaller programs": (64, "llama", "paper", torch.float32),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "small programs" else pytest.mark.slow) for n in CASES],
)
def test_interpreted_kernels_agree_with_indexing(name: str) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted(name)
        return
    # A kernel is made for the interpreter or for the GPU when it is defined.
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    code = f"from permutation.test_gpu import interpreted; interpreted({name!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def interpreted(name: str) -> None:
    """Move by kernels that run in Triton's interpreter."""
    size, family, scope, dtype = CASES[name]
    probe_kernels(CPU)
    # A probe sees matrices that stay as they are.
    with mock.patch.object(gpu, "move"), pytest.raises(WrongResult):
        probe_kernels(CPU)
    sizes = {} if size is None else {"columns": size, "rows": size}
    with mock.patch.dict(gpu.PROGRAM_BYTES, sizes):
        model = FAMILIES[family]().model.to(dtype)
        spec = discover(model, scope=scope)
        moved = {n: p.detach() for n, p in model.named_parameters() if n in spec.axes_of}
        _assert_moves_agree(spec, moved, seed=0)
        flat = torch.randn(1 + sum(t.numel() for t in moved.values())).to(dtype)
        parts = flat[1:].split([t.numel() for t in moved.values()])
        odd = {n: part.view(moved[n].shape) for n, part in zip(moved, parts, strict=True)}
        _assert_moves_agree(spec, odd, seed=1)
        assert flat[0] != 0


def _assert_moves_agree(spec: PermutationSpec, tensors: dict[str, Tensor], seed: int) -> None:
    permutation = draw(spec, torch.Generator().manual_seed(seed))
    expected = {n: t.clone() for n, t in tensors.items()}
    apply_to_tensors(permutation, expected)
    gpu.move(permutation, list(tensors.items()))
    assert all(torch.equal(tensors[n], expected[n]) for n in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "vit", "llama"])
def test_compiled_kernels_agree_with_indexing(family: str) -> None:
    _assert_compiled_agrees(FAMILIES[family]().model.cuda(), draws=5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_dtype_agrees_with_indexing(dtype: torch.dtype) -> None:
    _assert_compiled_agrees(FAMILIES["gpt2"]().model.to("cuda", dtype), draws=5)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [3072, 5000])
def test_compiled_kernels_agree_at_full_width(hidden: int) -> None:
    layers = [nn.Linear(768, hidden), nn.GELU(), nn.Linear(hidden, 768), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(768, 768))
    _assert_compiled_agrees(model.to("cuda"), draws=10)


def _assert_compiled_agrees(model: nn.Module, draws: int) -> None:
    spec = discover(model, scope="full")
    generator = torch.Generator(device="cuda").manual_seed(0)
    assert all(gpu.can_move(spec, n, p) for n, p in model.named_parameters() if n in spec.axes_of)
    for _ in range(draws):
        permutation = draw(spec, generator)
        expected = {n: p.detach().cpu() for n, p in model.named_parameters()}
        apply_to_tensors(permutation.to("cpu"), expected)
        apply(permutation, model)
        assert all(torch.equal(p.cpu(), expected[n]) for n, p in model.named_parameters())


@pytest.mark.gpu
def test_replaced_weights_are_moved_where_they_are_now() -> None:
    """Old addresses are never used for new ones."""
    model = FAMILIES["gpt2"]().model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    spec = discover(model, scope="full")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def shuffles_exactly() -> None:
        for _ in range(3):
            permutation = draw(spec, generator)
            expected = {n: p.detach().cpu() for n, p in model.named_parameters()}
            moments = {n: optimizer.state[p]["exp_avg"].cpu() for n, p in model.named_parameters()}
            for tensors in (expected, moments):
                apply_to_tensors(permutation.to("cpu"), tensors)
            apply(permutation, model, optimizer)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.cpu(), expected[name])
                assert torch.equal(optimizer.state[parameter]["exp_avg"].cpu(), moments[name])

    shuffles_exactly()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    shuffles_exactly()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    shuffles_exactly()
    model.bfloat16()
    shuffles_exactly()


@pytest.mark.gpu
def test_a_shuffle_never_waits_for_the_device_nor_takes_memory() -> None:
    model = FAMILIES["gpt2"]().model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    spec = discover(model, scope="full")
    generator = torch.Generator(device="cuda").manual_seed(0)
    permutation = draw(spec, generator)
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        apply(permutation, model, optimizer)
        extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 4096  # the tables of addresses
    with waiting_is_an_error():
        apply(draw(spec, generator), model, optimizer)


def test_every_tensor_of_the_families_is_served() -> None:
    for build in FAMILIES.values():
        for scope in ("paper", "full"):
            spec = discover(build().model, scope=scope)
            assert all(gpu.matrix_shapes(spec).values())


@pytest.mark.parametrize("program_bytes", [16 << 10, 64])
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
def test_programs_share_no_element_and_miss_none(family: str, program_bytes: int) -> None:
    spec = discover(FAMILIES[family]().model, scope="full")
    names = tuple(spec.axes_of)
    sizes = {"columns": program_bytes, "rows": program_bytes}
    shapes = [gpu.matrix_shapes(spec)[name] for name in names]
    with mock.patch.dict(gpu.PROGRAM_BYTES, sizes):
        found = gpu.build_launches(shapes, 4, CPU)
    for moving in ("columns", "rows"):
        touched = {name: torch.zeros(spec.shapes[name], dtype=torch.int64) for name in names}
        for launch in found:
            if launch.tile.moving == moving:
                _touch(launch, [touched[name] for name in names])
        for name in names:
            shape = gpu.matrix_shapes(spec)[name]
            assert shape is not None
            moves = shape.col_start if moving == "columns" else shape.row_start
            assert (touched[name] == int(moves is not None)).all(), name


def test_rows_too_long_for_shared_memory_are_left_to_indexing() -> None:
    wide = MatrixShape(rows=4, cols=9000, row_start=None, col_start=0)
    assert gpu.fits_shared_memory(wide, 4)
    assert not gpu.fits_shared_memory(wide, 8)
    across = MatrixShape(rows=4, cols=9000, row_start=0, col_start=None)
    assert gpu.fits_shared_memory(across, 8)


def _touch(launch: Launch, tensors: list[torch.Tensor]) -> None:
    """Add one to every element a program of the launch owns, as the kernels take their share."""
    tile = launch.tile
    for program, job in enumerate(launch.programs.tolist()):
        place, rows, cols, _, first = launch.jobs[job].tolist()
        matrix = tensors[place].view(rows, cols)
        block = program - first
        if tile.moving == "columns":
            assert cols <= tile.cols
            matrix[block * tile.rows : (block + 1) * tile.rows] += 1
        else:
            assert rows <= tile.rows
            matrix[:, block * tile.cols : (block + 1) * tile.cols] += 1


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tiles_fit_and_tell_the_truth_about_alignment(size: int) -> None:
    for rows in (1, 7, 768, 3072, 5120, 16384):
        for cols in (1, 6, 768, 3072, 16384):
            shape = MatrixShape(rows=rows, cols=cols, row_start=0, col_start=0)
            for moving in ("columns", "rows"):
                tile = _tile_of(shape, moving, size)
                assert tile.rows * tile.cols * size <= 128 << 10
                assert 4 <= _num_warps(tile, size) <= 32
                assert tile.alignment >= size
                assert cols * size % tile.alignment == 0
                assert tile.moving == "columns" or tile.cols * size % tile.alignment == 0


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_slabs_are_a_sector_wide_as_long_as_registers_take_that(size: int) -> None:
    for rows, width in ((768, 64), (3072, 32), (4096, 32), (5120, 16), (16384, 8)):
        shape = MatrixShape(rows=rows, cols=768, row_start=0, col_start=None)
        assert _tile_of(shape, "rows", size).cols * size == width
