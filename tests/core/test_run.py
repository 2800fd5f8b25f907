"""Fast and core agree: same seed, same batches, the same releases to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from shuffled_dpsgd.core.run import train
from shuffled_dpsgd.training import PrivacyPlan, make_private
from shuffled_dpsgd.training.data import shaped
from training.cases import Case, bert_case, gpt2_case, mlp_case, vit_case

SETTINGS: dict[str, dict[str, Any]] = {
    "one noise": {"noise_multiplier": 0.7},
    "two noises and a batch clip": {
        "accounting": "paper",
        "shuffle": "at-release",
        "noise_multiplier": 0.4,
        "unshuffled_noise_multiplier": 1.1,
        "batch_clip_norm": 0.5,
    },
}


def lora_case(dtype: torch.dtype) -> Case:
    """Low-rank adapters on a tied language model; the base is frozen."""
    inner = gpt2_case(dtype)

    def make() -> nn.Module:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        torch.manual_seed(1)
        model = peft.get_peft_model(inner.make(), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
        return model.to(dtype)  # type: ignore[no-any-return]

    return replace(inner, make=make)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)


def single(case: Case) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The case's loss of one record."""

    def loss(model: nn.Module, record: Any) -> torch.Tensor:
        return case.loss(model, shaped(default_collate([record]))).sum()

    return loss


def fast_run(case: Case, **settings: Any) -> tuple[nn.Module, PrivacyPlan, str]:
    model = case.make()
    private = make_private(
        model,
        sgd(model),
        dataset_size=len(case.data),
        expected_batch_size=5,
        num_steps=4,
        delta=1e-3,
        clip_norm=0.4,
        seed=11,
        physical_batch_size=3,
        **({"shuffle": "off"} | settings),
    )
    for batch in private.batches(case.data):
        private.backward(case.loss(model, batch))
        private.step()
    card = private.card()
    assert card.certified is not None
    return model, private.plan, card.certified.describe()


CASES = [mlp_case, bert_case, gpt2_case, vit_case]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((make, settings) for make in CASES for settings in SETTINGS.values()),
        (lora_case, SETTINGS["one noise"]),
    ],
)
def test_fast_and_core_release_the_same(
    make: Callable[[torch.dtype], Case], settings: dict[str, Any]
) -> None:
    case = make(torch.float64)
    fast, plan, described = fast_run(case, **settings)
    slow = case.make()
    card = train(slow, sgd(slow), single(case), case.data, plan)
    assert card.certified is not None
    assert card.certified.describe() == described
    pairs = list(zip(fast.parameters(), slow.parameters(), strict=True))
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-9
    start = case.make()
    moved = [
        (a - b).detach().abs().max()
        for a, b in zip(fast.parameters(), start.parameters(), strict=True)
    ]
    assert float(torch.stack(moved).max()) > 1e-3
