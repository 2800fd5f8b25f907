"""TF32 and bfloat16 shortcuts a user switches on for the model do not reach norms and sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from inspect import isfunction
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.kernels import linear_maps, norm_layers, plain
from shuffled_dpsgd.clipping.kernels.float32 import full_float32


@pytest.fixture
def shortcuts() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def knobs() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.usefixtures("shortcuts")
def test_shortcuts_are_off_inside_and_back_afterwards() -> None:
    before = knobs()
    assert before == ("tf32", "bf16")
    inside: list[tuple[str, str]] = []

    @full_float32()
    def fails() -> None:
        inside.append(knobs())
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert inside == [("ieee", "ieee")]
    assert knobs() == before


@pytest.mark.usefixtures("shortcuts")
def test_shortcuts_stay_off_while_any_thread_is_inside() -> None:
    """The switches are those of the process: a thread that leaves must not switch them back."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with full_float32():
            entered.set()
            leave.wait(10)

    before = knobs()
    other = threading.Thread(target=stay)
    other.start()
    entered.wait(10)
    with full_float32():
        leave.set()
        other.join()
        assert knobs() == ("ieee", "ieee")
    assert knobs() == before


@pytest.mark.usefixtures("shortcuts")
@pytest.mark.parametrize("clip", ["flat", "per-layer"])
@pytest.mark.parametrize("strategy", ["bookkeeping", "mixed", "instantiate", "ghost"])
def test_every_product_at_the_end_runs_in_full_float32(
    clip: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def watch(primitive: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(knobs())
            return primitive(*args, **kwargs)

        return watched

    for module in (linear_maps, norm_layers, plain):
        for name, primitive in vars(module).items():
            if isfunction(primitive) and primitive.__module__ == module.__name__:
                monkeypatch.setattr(module, name, watch(primitive))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    engine = ClippingEngine(model, clip_norm=0.1, clip=clip, strategy=strategy)
    with engine:
        engine.backward(model(torch.randn(3, 7, 6)).square().sum((1, 2)))
    assert seen
    assert set(seen) == {("ieee", "ieee")}
