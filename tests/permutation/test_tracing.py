"""A trace moves what it proves; everything it cannot follow stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from permutation.custom import CUSTOM
from permutation.zoo import randomise
from shuffled_dpsgd.permutation import PermutationSpec, discover, verify


class Block(nn.Module):
    """Two layers of which a subclass decides the use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 3)


class ReturnsHidden(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.up(x))
        return self.down(hidden), hidden


class ReusesWeight(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(self.up(x)), self.up.weight.t())


class Softmax(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.softmax(self.up(x), dim=-1))


class IndexesFeatures(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden) + hidden[:, 0:1]


class AddsConstant(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.arange(12.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x) + self.ramp))


class Divides(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = 1.0 / (2.0 + torch.sigmoid(self.up(x)))
        return self.down(hidden).cumsum(dim=-1) + hidden.cumsum(dim=-1)[..., :3]


class BranchesOnMask(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if mask is None:
            hidden = hidden.cumsum(dim=-1)
        return self.down(hidden)


class BranchesOnMode(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if not self.training:
            hidden = hidden.flip(-1)
        return self.down(hidden)


class BranchesOnData(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if hidden.sum() > 0:
            hidden = hidden.cumsum(dim=-1)
        return self.down(torch.relu(hidden))


class UsesTokenTwice(Block):
    """The token joins the hidden features once, and is an output the other time."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(torch.relu(self.up(x) * self.token)), self.token * 2


class AsksForType(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if isinstance(hidden, torch.Tensor):
            hidden = hidden.cumsum(dim=-1)
        return self.down(hidden)


REFUSED = [
    AsksForType,
    ReturnsHidden,
    ReusesWeight,
    Softmax,
    IndexesFeatures,
    AddsConstant,
    Divides,
    BranchesOnMask,
    BranchesOnMode,
    BranchesOnData,
    UsesTokenTwice,
]


def check(model: nn.Module, spec: PermutationSpec) -> None:
    """`verify` looks at evaluation mode only, so it comes on top of what is asserted."""
    verify(model, torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), spec)


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_proven_is_not_moved(kind: type[Block]) -> None:
    model = randomise(kind())
    spec = discover(model, scope="full")
    assert spec.groups == ()
    assert all(spec.unmoved.values())
    check(model, spec)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: object = None
        self.seen: list[object] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        self.seen.append(x)
        return self.layer(x)


def test_a_trace_leaves_no_symbols_in_a_module() -> None:
    model = Remembers()
    discover(model)
    assert model.last is None
    assert model.seen == []


def test_a_failed_trace_is_noted_and_children_are_tried() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([CUSTOM["gated-residual"]().model, BranchesOnData()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.parts[0](x)
            return first if first.sum() > 1e9 else first + self.parts[1](x)[..., :1]

    model = randomise(Outer())
    training = model.training
    spec = discover(model, scope="full")
    assert model.training == training
    assert {name.split(".")[1] for name in spec.moved_names} == {"0"}
    assert [group.kind for group in spec.groups] == ["mlp-hidden"]
    assert [note.split(":")[0] for note in spec.notes] == ["Outer", "BranchesOnData"]
    check(model, spec)


@pytest.mark.parametrize("scope", ["paper", "full"])
def test_hidden_units_move_and_streams_of_unknown_models_stay(scope: str) -> None:
    model = CUSTOM["gated-residual"]().model
    (hidden,) = discover(model, scope=scope).groups  # type: ignore[arg-type]
    assert hidden.kind == "mlp-hidden"
    assert {m.parameter for m in hidden.members} == {
        "gate.weight",
        "gate.bias",
        "up.weight",
        "up.bias",
        "down.weight",
    }


def test_a_layer_applied_twice_moves_on_both_axes() -> None:
    (loop,) = discover(CUSTOM["shared-layer"]().model).groups
    assert [(m.parameter, m.axis) for m in loop.members if m.parameter == "loop.weight"] == [
        ("loop.weight", 0),
        ("loop.weight", 1),
    ]
