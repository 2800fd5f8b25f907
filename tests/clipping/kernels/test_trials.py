"""Trials pass with kernels that work, and see those that do not.

On a GPU, else in Triton's interpreter; skipped where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from on_triton import DEVICE, ON_GPU
from shuffled_dpsgd.clipping.kernels import choices, trials
from shuffled_dpsgd.runtime.backends import WrongResult

WHERE = torch.device(DEVICE)
# Each trial with a function that it should try, and where that function leaves its result.
TRIALS = [
    (trials.try_kernels, "triton.linear", "gram_sq_norms", None),
    (trials.try_kernels, "triton.tiles", "tile_sq_norms", None),
    (trials.try_kernels, "triton.sums", "weighted_outer_sums", 3),
    (trials.try_float32_products, "triton.linear", "gram_sq_norms", None),
    (trials.try_float32_products, "triton.tiles", "tile_sq_norms", None),
    (trials.try_float32_products, "triton.sums", "weighted_outer_sums", 3),
    (trials.try_kernels, "triton.norms", "norm_sums", None),
]
GLUON = [
    (trials.try_gluon_sums, "gluon.weighted_sums", "weighted_outer_sums", 3),
]
Trial = Callable[[torch.device], None]


def spoil(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, place: int | None
) -> None:
    """Make what the function returns, or leaves in an argument, smaller by a tenth."""
    right = getattr(module, name)

    def wrong(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        if place is None:
            return 0.9 * result
        outs = args[place]
        for out in [outs] if isinstance(outs, torch.Tensor) else outs:
            out.mul_(0.9)
        return result

    monkeypatch.setattr(module, name, wrong)


@pytest.mark.parametrize("trial", sorted({case[0] for case in TRIALS}, key=str))
def test_kernels_that_work_pass(trial: Trial) -> None:
    state = torch.get_rng_state()
    trial(WHERE)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("trial", "module", "name", "place"), TRIALS)
def test_wrong_results_are_seen(
    trial: Trial, module: str, name: str, place: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, choices.module(module), name, place)
    with pytest.raises(WrongResult):
        trial(WHERE)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("trial", "module", "name", "place"), GLUON)
def test_gluon_passes_and_is_seen_to_be_wrong(
    trial: Trial, module: str, name: str, place: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not choices.is_hopper(WHERE):
        pytest.skip("written for another device")
    trial(WHERE)
    spoil(monkeypatch, choices.module(module), name, place)
    with pytest.raises(WrongResult):
        trial(WHERE)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_every_backend_serves_on_this_gpu() -> None:
    device = torch.device("cuda:0")
    assert choices.may_take(choices.KERNELS, device)
    if choices.is_hopper(device):
        assert choices.may_take(choices.GLUON_SUMS, device)
