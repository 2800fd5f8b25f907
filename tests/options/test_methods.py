"""Methods by name: what each decides, what it leaves open, what it refuses."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from shuffled_dpsgd.accounting import calibrate_certified, calibrate_rdp, certified_claim
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import METHODS, Budget, Method
from shuffled_dpsgd.training import make_private
from slow_cases import one_in

BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}
PLAN: dict[str, Any] = {"dataset_size": 1000, "expected_batch_size": 100, "num_steps": 20}


def test_every_method_has_a_summary() -> None:
    assert tuple(METHODS) == get_args(Method)
    assert all(method.summary for method in METHODS.values())


@pytest.mark.parametrize(
    ("given", "decided"),
    [
        ({}, ("certified", "auto", "bookkeeping")),
        ({"batch_clip_norm": 1.0}, ("certified", "every-step", "bookkeeping")),
        ({"noise_frame": "unshuffled"}, ("certified", "every-step", "bookkeeping")),
        ({"accounting": "paper", "batch_clip_norm": 1}, ("paper", "every-step", "bookkeeping")),
        ({"method": "shuffled", "batch_clip_norm": 1.0}, ("paper", "every-step", "bookkeeping")),
        (
            {"method": "shuffled", "accounting": "certified", "shuffle": "at-release"},
            ("certified", "at-release", "bookkeeping"),
        ),
        ({"method": "mixopt"}, ("rdp", "off", "mixed")),
        ({"method": "mixopt", "accounting": "certified"}, ("certified", "off", "mixed")),
        ({"method": "ghost"}, ("rdp", "off", "ghost")),
        ({"method": "certified", "strategy": "ghost"}, ("certified", "off", "ghost")),
    ],
)
def test_what_is_left_open_is_filled_in(
    given: dict[str, Any], decided: tuple[str, str, str]
) -> None:
    budget = Budget(**BUDGET, **given)
    assert (budget.accounting, budget.shuffle, budget.strategy) == decided
    assert budget.scope == ("full" if budget.shuffle == "auto" else "paper")


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"method": "mixopt", "shuffle": "every-step"}, "shuffle"),
        ({"method": "mixopt", "strategy": "ghost"}, "strategy"),
        ({"method": "ghost", "accounting": "paper", "batch_clip_norm": 1.0}, "accounting"),
        ({"method": "ghost", "batch_clip_norm": 1.0}, "batch_clip_norm"),
        ({"method": "certified", "accounting": "rdp"}, "accounting"),
        ({"method": "shuffled", "shuffle": "off"}, "shuffle"),
        ({"method": "shuffled"}, "batch_clip_norm"),
        ({"method": "non-private"}, "epsilon"),
        ({"method": "non-private", "epsilon": None, "noise_multiplier": 1.0}, "noise_multiplier"),
        ({"method": "non-private", "epsilon": None, "clip_norm": 0.1}, "clip_norm"),
        ({"method": "dpsgd"}, "method"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Budget(**(BUDGET | given))
    assert refused.value.argument == argument


def test_non_private_has_neither_noise_nor_clip() -> None:
    budget = Budget(method="non-private", delta=1e-5)
    assert (budget.noise_multiplier, budget.clip_norm) == (0.0, math.inf)
    assert budget.shuffle == "off"


def test_rdp_asks_for_more_noise_and_meets_the_target() -> None:
    run: dict[str, Any] = {"sampling_prob": 0.1, "num_steps": 20}
    loose = calibrate_rdp(**BUDGET, **run).noise_multiplier
    tight = calibrate_certified(**BUDGET, **run).noise_multiplier
    assert loose > 1.03 * tight
    assert certified_claim(noise_multiplier=loose, delta=1e-5, **run).epsilon < 1.0


@pytest.mark.parametrize("method", one_in(3, ["mixopt", "ghost", "certified"]))
def test_baselines_train_the_same_weights_from_the_same_noise(method: Method) -> None:
    """The engine's strategy changes nothing that is released: one step, against plain options."""

    def one_step(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).double()
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            **PLAN,
            noise_multiplier=1.0,
            delta=1e-5,
            seed=0,
            **options,
        )
        data = torch.utils.data.TensorDataset(
            torch.randn(1000, 4, dtype=torch.float64), torch.randint(2, (1000,))
        )
        for x, y in private.batches(data, num_steps=1):
            private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
            private.step()
        return model.weight.detach().clone()

    assert torch.allclose(one_step(method=method), one_step(shuffle="off"), rtol=0, atol=1e-12)


def test_the_card_names_the_accountant_of_the_target() -> None:
    model = torch.nn.Linear(4, 2)
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), **PLAN, **BUDGET, method="mixopt"
    )
    card = private.card()
    assert "Rényi" in card.target
    assert card.paper_is_small_print
    private.close()
