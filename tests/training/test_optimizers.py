"""Optimizers: elementwise ones pass, the others are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.optimizers import check_optimizer, check_parameters
from training.cases import make_mlp

ELEMENTWISE = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_elementwise_optimizers_pass(kind: Any) -> None:
    check_optimizer(kind(make_mlp().parameters()), shuffled=True)


class SignDescent(torch.optim.Optimizer):
    """An optimizer nobody has heard of, elementwise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"])


class RowDescent(SignDescent):
    """Also unknown, but a coordinate's update depends on its row."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / p.grad.norm(dim=-1, keepdim=True), alpha=-group["lr"])


class MyShampoo(SignDescent):
    pass


def test_unknown_optimizers_are_tried() -> None:
    check_optimizer(SignDescent(make_mlp().parameters()), shuffled=True)
    with pytest.raises(InvalidArgumentError, match="does not commute"):
        check_optimizer(RowDescent(make_mlp().parameters()), shuffled=True)
    check_optimizer(RowDescent(make_mlp().parameters()), shuffled=False)


def test_known_offenders_are_refused_by_name_with_the_reason() -> None:
    with pytest.raises(InvalidArgumentError, match=r"matrix roots.*MyShampoo.*shuffle='off'"):
        check_optimizer(MyShampoo(make_mlp().parameters()), shuffled=True)
    with pytest.raises(InvalidArgumentError, match=r"row and column.*Adafactor"):
        check_optimizer(torch.optim.Adafactor(make_mlp().parameters()), shuffled=True)
    matrices = [p for p in make_mlp().parameters() if p.dim() == 2]
    with pytest.raises(InvalidArgumentError, match=r"orthogonalises.*Muon"):
        check_optimizer(torch.optim.Muon(matrices), shuffled=True)
    for shuffled in (True, False):
        with pytest.raises(InvalidArgumentError, match=r"evaluates the loss again.*LBFGS"):
            check_optimizer(torch.optim.LBFGS(make_mlp().parameters()), shuffled=shuffled)


def test_quantised_state_is_refused_by_what_it_is() -> None:
    """Tried out on a small tensor, it only said that it knows no alpha."""
    library = pytest.importorskip("bitsandbytes")
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = library.optim.AdamW([parameter], optim_bits=8)
    with pytest.raises(InvalidArgumentError, match=r"quantised in blocks.*AdamW of bitsandbytes"):
        check_optimizer(optimizer, shuffled=True)
    check_optimizer(optimizer, shuffled=False)


def test_the_optimizer_must_hold_exactly_the_trainable_parameters() -> None:
    model = make_mlp()
    forgotten = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    with pytest.raises(InvalidArgumentError, match=r"first 0\.weight"):
        check_parameters(model, forgotten)
    model[0].requires_grad_(False)
    check_parameters(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    stranger = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="1 others"):
        check_parameters(model, stranger)
    with pytest.raises(InvalidArgumentError, match="trainable"):
        check_parameters(model.requires_grad_(False), stranger)


class SAM(torch.optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class AdamWScheduleFree(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "sharded", "expected"),
    [
        (SAM, False, "evaluates the loss again"),
        (AdamWScheduleFree, False, "two points"),
        (torch.optim.Adafactor, True, "of a shard"),
    ],
)
def test_optimizers_that_cannot_work_are_refused_unshuffled_too(
    kind: type[torch.optim.Optimizer], sharded: bool, expected: str
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))])  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match=expected):
        check_optimizer(optimizer, shuffled=False, sharded=sharded)
