"""Workers move exactly as plain indexing does, raise in the caller, and leave nothing half done."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers

from shuffled_dpsgd.permutation import apply, discover, draw
from shuffled_dpsgd.permutation.move import threads

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool)
SMALL = transformers.GPT2Config(n_layer=1, n_embd=48, n_head=2, vocab_size=401, n_positions=16)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, and tensors of a test large enough for many blocks; the threads stay as set."""
    monkeypatch.setattr(threads, "_SMALL_MODEL", 0)
    monkeypatch.setattr(threads, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(threads, "_FEWEST_ROWS", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, not-a-numbers with payloads included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    bits = torch.empty(shape, dtype=BITS[dtype.itemsize])
    return bits.random_(generator=generator).view(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    carrier = BITS[left.element_size()]
    return torch.equal(left.view(carrier), right.view(carrier))


def orders(shape: tuple[int, ...], axes: list[int], seed: int = 1) -> list[threads.OnAxis]:
    generator = torch.Generator().manual_seed(seed)
    return [(axis, torch.randperm(shape[axis], generator=generator)) for axis in axes]


def indexed(tensor: torch.Tensor, axes: list[threads.OnAxis]) -> torch.Tensor:
    for axis, index in axes:
        tensor = tensor[(slice(None),) * axis + (index,)]
    return tensor.clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(501,), (101, 37), (37, 203), (64, 64), (53, 3, 11)])
def test_moving_equals_plain_indexing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    last = len(shape) - 1
    large = random_bits((301, 67), dtype, seed=5)
    by_rows = orders((301, 67), [0])
    for axes in ([0], [last], sorted({0, last})):
        along = orders(shape, axes)
        tensors = [random_bits(shape, dtype, seed) for seed in range(3)]
        expected = [*(indexed(tensor, along) for tensor in tensors), indexed(large, by_rows)]
        places = [tensor.data_ptr() for tensor in tensors]
        assert threads.move([(large, by_rows), *((tensor, along) for tensor in tensors)]) == []
        assert all(map(same_bits, (*tensors, large), expected))
        assert places == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("kind", ["identity", "one cycle", "pairs", "random"])
def test_any_cycles_move_and_set_few_rows_aside(kind: str) -> None:
    num_rows, size = 103, 16
    rows = torch.arange(num_rows)
    index = {
        "identity": rows,
        "one cycle": rows.roll(1),
        "pairs": rows.flip(0),
        "random": torch.randperm(num_rows, generator=torch.Generator().manual_seed(3)),
    }[kind]
    route = threads._find_route(index, size)
    assert sorted(np.concatenate([block.target for block in route.blocks])) == rows.tolist()
    assert all(len(block.holes) <= 2 for block in route.blocks)
    tensor = torch.arange(num_rows * 61.0).view(num_rows, 61)
    expected = tensor[index]
    assert threads.move([(tensor, [(0, index)])]) == []
    assert torch.equal(tensor, expected)


def test_what_does_not_suit_is_left_untouched() -> None:
    whole = torch.randn(300, 100)
    transposed, strided = torch.randn(80, 90).t(), torch.randn(200, 100)[:, ::2]
    middle = torch.randn(7, 50, 6)
    with torch.inference_mode():
        inference = torch.randn(60, 60)
    others = [
        (transposed, orders((90, 80), [0, 1])),
        (strided, orders((200, 50), [1])),
        (middle, orders((7, 50, 6), [1])),
        (inference, orders((60, 60), [0])),
        (torch.empty(0, 5), orders((0, 5), [0, 1])),
    ]
    kept = [tensor.clone() for tensor, _ in others]
    along = orders((300, 100), [0, 1])
    expected = indexed(whole, along)
    left = threads.move([(whole, along), *others])
    assert [tensor for tensor, _ in left] == [tensor for tensor, _ in others]
    assert all(torch.equal(tensor, was) for (tensor, _), was in zip(left, kept, strict=True))
    assert torch.equal(whole, expected)


def test_one_thread_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(threads, "_share_out", None)
    placed = [(torch.randn(300, 100), orders((300, 100), [0, 1]))]
    assert threads.move(placed) == placed
    monkeypatch.undo()


def test_workers_need_no_more_than_the_largest_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads on a small model: some stay away."""
    needed: list[int] = []

    def count(matrices: list[threads._Matrix], num_workers: int) -> None:
        needed.append(num_workers * max(m.extra_elements for m in matrices))

    shape = (300, 100)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 64)
        patch.setattr(threads, "_share_out", count)
        threads.move([(torch.empty(shape), orders(shape, [0, 1])) for _ in range(3)])
    assert len(needed) == 1
    assert 0 < needed[0] <= 300 * 100


def test_what_a_worker_raises_is_raised_in_the_caller() -> None:
    beyond = torch.arange(100) + 1
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|DATA bounds)"):
        threads.move([(torch.zeros(300, 100), [(1, beyond)])])


def test_an_interrupt_comes_after_all_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the caller is by then, for tasks begin when all workers are there."""
    gather = threads._gather_columns
    pending = [signal.SIGINT]

    def interrupted(*arguments: object) -> None:
        while pending:
            os.kill(os.getpid(), pending.pop())
        gather(*arguments)

    monkeypatch.setattr(threads, "_gather_columns", interrupted)
    shape = (200, 100)
    along = orders(shape, [0, 1])
    tensors = [torch.randn(shape) for _ in range(20)]
    expected = [indexed(tensor, along) for tensor in tensors]
    with pytest.raises(KeyboardInterrupt):
        threads.move([(tensor, along) for tensor in tensors])
    assert all(map(torch.equal, tensors, expected))


def test_autograd_refuses_a_backward_over_moved_weights() -> None:
    weight = torch.randn(300, 100, requires_grad=True)
    loss = (weight * weight).sum()
    threads.move([(weight, orders((300, 100), [0]))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_moves_as_on_one_thread(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []
    shared_out = Mock(wraps=threads._share_out)
    monkeypatch.setattr(threads, "_share_out", shared_out)
    for num_threads in (1, 2):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(SMALL).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed)
            ).to(dtype)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
            permutation = draw(discover(model, scope="full"), torch.Generator().manual_seed(0))
            apply(permutation, model, optimizer)
        assert shared_out.call_count == num_threads - 1
        assert model.lm_head.weight is model.transformer.wte.weight
        states = [t for state in optimizer.state.values() for t in state.values()]
        moved.append([*model.parameters(), *(p.grad for p in model.parameters()), *states])
    assert all(map(torch.equal, *moved))
