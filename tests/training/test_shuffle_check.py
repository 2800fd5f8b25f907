"""A shuffle that changes what the model computes is stopped before anything is released."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import InvarianceError
from shuffled_dpsgd.training import PrivateTraining, make_private
from training.cases import Case, bert_case, distance, run, weights

WIDTH, LENGTH = 8, 4


class Encoded(nn.Module):
    """PyTorch's encoder layer under a classifier; subclasses say how it is called."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 2, dim_feedforward=16, dropout=dropout, batch_first=True
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean(dim=1))


def unseen(x: torch.Tensor) -> torch.Tensor:
    """No trace gets past this: how many records there are is not known to it."""
    return x[: len(x)]


class CallsAnInnerLayer(Encoded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = unseen(x)
        hidden = self.block.linear1(x)
        return self.head(self.block(x).mean(dim=1)) + hidden[..., :3].mean(dim=1)


class DiffersInTraining(Encoded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.block(unseen(x)).mean(dim=1))
        return found + self.block.linear1(x)[..., :3].mean(dim=1) if self.training else found


class ChangesItsWays(Encoded):
    """Calls an inner layer only once somebody says so."""

    odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.block(unseen(x)).mean(dim=1))
        return found + self.block.linear1(x)[..., :3].mean(dim=1) if self.odd else found


@dataclass
class Answer:
    scores: torch.Tensor


class ReturnsADataclass(CallsAnInnerLayer):
    def forward(self, x: torch.Tensor) -> Any:
        return Answer(scores=super().forward(x))


def sequences() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, LENGTH, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (40,), generator=generator))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch.x)
    scores = found.scores if isinstance(found, Answer) else found
    return F.cross_entropy(scores, batch.y, reduction="none")


def start(model: nn.Module, **changes: Any) -> PrivateTraining:
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 8,
        "num_steps": 6,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "scope": "full",
        "seed": 3,
        "physical_batch_size": 5,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return make_private(model, optimizer, **(settings | changes))


def case_of(model: nn.Module) -> Case:
    return Case(make=lambda: model, data=sequences(), loss=classify)


@pytest.mark.parametrize("shuffle", ["every-step", "at-release"])
@pytest.mark.parametrize(
    "kind",
    [CallsAnInnerLayer, DiffersInTraining, ReturnsADataclass],
)
def test_a_function_that_would_change_is_refused_before_the_first_release(
    kind: type[nn.Module], shuffle: str
) -> None:
    torch.manual_seed(0)
    model = kind()
    before = weights(model)
    private = start(model, shuffle=shuffle)
    with pytest.raises(InvarianceError, match="permuting changed the model's outputs"):
        run(private, case_of(model))
    assert private.ledger.spent == 0
    assert distance(before, weights(model)) == 0.0
    assert model.training


def test_the_group_is_named() -> None:
    torch.manual_seed(0)
    model = CallsAnInnerLayer()
    with pytest.raises(InvarianceError, match=r"^block\.mlp: "):
        run(start(model), case_of(model))


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_a_change_that_comes_later_is_noticed_and_everything_moved_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = ChangesItsWays()
    private = start(model)
    assert len(run(private, case_of(model), num_steps=1)) == 1
    model.odd = True
    updated: dict[str, Any] = {}
    move = private.shuffling.permute

    def remember(step: int) -> None:
        momentum = {n: private.optimizer.state[p]["momentum_buffer"] for n, p in named(model)}
        updated.update(weights=weights(model), momentum={n: m.clone() for n, m in momentum.items()})
        move(step)

    monkeypatch.setattr(private.shuffling, "permute", remember)
    with pytest.raises(InvarianceError, match="all groups together"):
        run(private, case_of(model))
    now = {n: private.optimizer.state[p]["momentum_buffer"] for n, p in named(model)}
    assert distance(updated["weights"], weights(model)) == 0.0
    assert distance(updated["momentum"], now) == 0.0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checks_change_neither_the_run_nor_the_generators(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    finals = []
    for checked in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = Encoded(dropout)
        private = start(model)
        if not checked:
            monkeypatch.setattr(private.shuffling, "_check", None)
        run(private, case_of(model))
        drawn = (float(torch.rand(())), random.random(), float(np.random.rand()))  # noqa: NPY002
        finals.append((weights(model), drawn))
        assert ("outputs compared" in str(private.card())) == checked
    assert distance(finals[0][0], finals[1][0]) == 0.0
    assert finals[0][1] == finals[1][1]


def test_the_card_says_how_often() -> None:
    case = bert_case()
    model = case.make()
    private = start(model, num_steps=5)
    run(private, case)
    card = private.card()
    # The trial, and shuffles 0, 1, 2 and 4.
    assert card.to_json()["shuffles_verified"] == 5
    assert "outputs compared before and after 5 times: never changed" in str(card)
    off = start(case.make(), shuffle="off")
    run(off, case, num_steps=1)
    assert off.card().to_json()["shuffles_verified"] == 0


def test_a_record_that_breaks_the_model_stops_nothing() -> None:
    torch.manual_seed(0)
    model, data = Encoded(), sequences()
    data.tensors[0][5] = float("nan")
    private = start(model)
    run(private, Case(make=lambda: model, data=data, loss=classify))
    assert private.steps_taken == 6


def test_nothing_stays_on_the_model() -> None:
    torch.manual_seed(0)
    model = Encoded()
    private = start(model)
    run(private, case_of(model))
    private.close()
    assert not model._forward_pre_hooks


def test_what_needs_autocast_is_compared_under_it() -> None:
    class HalfOnly(Encoded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.block(x)
            if not torch.is_autocast_enabled("cpu"):
                raise RuntimeError("this kernel exists for bfloat16 only")
            return self.head(found.mean(dim=1))

    torch.manual_seed(0)
    model = HalfOnly()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(batch.x)
        return F.cross_entropy(scores.float(), batch.y, reduction="none")

    private = start(model)
    run(private, Case(make=lambda: model, data=sequences(), loss=loss), num_steps=2)
    assert private.card().shuffles_verified == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_are_checked_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    called = torch.compile(model, backend="aot_eager")
    private = start(called)  # type: ignore[arg-type]

    def loss(_: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(called(batch.x), batch.y, reduction="none")

    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    run(private, Case(make=lambda: model, data=data, loss=loss), num_steps=2)
    assert private.card().shuffles_verified == 3
