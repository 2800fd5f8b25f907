"""The same laws on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shuffled_dpsgd.permutation import apply
from shuffled_dpsgd.training import (
    PrivacyOptions,
    PrivateTraining,
    ShuffledGaussianMechanism,
    load_checkpoint,
    make_plan,
    make_private,
    save_checkpoint,
)
from shuffled_dpsgd.training.device_noise import DeviceNoise
from shuffled_dpsgd.training.metrics import Release
from training.cases import Case, distance, run, vit_case, weights
from waiting import waiting_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def start(case: Case, **changes: Any) -> PrivateTraining:
    model = case.make().cuda()
    settings: dict[str, Any] = {
        "dataset_size": len(case.data),
        "expected_batch_size": 10,
        "num_steps": 6,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "batch_clip_norm": 2.0,
        "seed": 7,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return make_private(model, optimizer, **(settings | changes))


def test_noise_on_the_device_has_the_std_asked_for() -> None:
    sums = {"a": torch.zeros(1000, 2000, device="cuda"), "b": torch.zeros(500_000, device="cuda")}
    DeviceNoise().add_(sums, {"a": 2.0, "b": 0.5}, key=bytes(32))
    assert float(sums["a"].std()) == pytest.approx(2.0, rel=0.01)
    assert float(sums["b"].std()) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_a_release_waits_for_nothing_and_is_that_of_the_cpu(scale: float) -> None:
    """Batch clip, noise and division are queued; inside the ball and outside of it."""
    request = PrivacyOptions(
        dataset_size=100,
        expected_batch_size=5,
        num_steps=1,
        delta=1e-5,
        noise_multiplier=0.0,
        batch_clip_norm=1.0,
        seed=0,
    )
    plan = make_plan(request, sizes={"a": 1200, "b": 40}, moved=frozenset({"a"}))
    mechanism = ShuffledGaussianMechanism(plan, DeviceNoise())

    def sums(device: str) -> dict[str, torch.Tensor]:
        values = scale * torch.linspace(-1, 1, 1240)
        return {"a": values[:1200].to(device), "b": values[1200:].to(device)}

    mechanism.privatize(sums("cuda"), key=bytes(32))
    found, expected = sums("cuda"), sums("cpu")
    with waiting_is_an_error():
        norms = mechanism.privatize(found, key=bytes(32))
    record = Release.of(plan, norms)
    same = Release.of(plan, mechanism.privatize(expected, key=bytes(32)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].cpu(), tensor)
    for one, other in zip(record.blocks, same.blocks, strict=True):
        assert one.sum_norm == pytest.approx(other.sum_norm)
        assert one.batch_clip_factor == pytest.approx(other.batch_clip_factor)
    assert (same.blocks[0].batch_clip_factor < 1.0) == (scale > 1.0)


def test_shuffling_changes_no_loss_in_the_common_frame() -> None:
    case = vit_case(torch.float64)
    plain = start(case, shuffle="off")
    shuffled = start(case, shuffle="every-step", noise_frame="unshuffled")
    assert run(shuffled, case) == pytest.approx(run(plain, case), rel=1e-9)
    assert shuffled.frame is not None
    apply(shuffled.frame.inverse(), shuffled.model)
    assert distance(weights(shuffled.model), weights(plain.model)) < 1e-7


def test_resume_continues_the_run(tmp_path: Path) -> None:
    case = vit_case(torch.float64)
    whole = start(case)
    run(whole, case)
    first = start(case)
    run(first, case, num_steps=3)
    path = save_checkpoint(first, tmp_path)
    second = start(case)
    load_checkpoint(second, path)
    run(second, case)
    assert distance(weights(whole.model), weights(second.model)) < 1e-9
