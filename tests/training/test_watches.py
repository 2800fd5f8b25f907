"""Nothing un-noised reaches the optimizer or the published model behind a run's back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError, UnsupportedModuleError
from shuffled_dpsgd.training import PrivateTraining, make_private
from training.cases import Case, classify, make_mlp, mlp_case, run, vectors


def private_run(model: nn.Module, **changes: Any) -> PrivateTraining:
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 8,
        "num_steps": 6,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
        "seed": 3,
        "physical_batch_size": 3,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, **(settings | changes))


def with_frozen_first_layer() -> nn.Module:
    model = make_mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def thaw(private: PrivateTraining) -> None:
    private.model[0].requires_grad_(True)  # type: ignore[operator]


def freeze(private: PrivateTraining) -> None:
    private.model[2].requires_grad_(False)  # type: ignore[operator]


def replace(private: PrivateTraining) -> None:
    layer: Any = private.model[2]  # type: ignore[operator]
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def replace_module(private: PrivateTraining) -> None:
    private.model[2] = nn.Linear(10, 3)  # type: ignore[operator]


def add_module(private: PrivateTraining) -> None:
    private.model.append(nn.Linear(3, 3))  # type: ignore[operator]


def load_by_assignment(private: PrivateTraining) -> None:
    state = {name: value.clone() for name, value in private.model.state_dict().items()}
    private.model.load_state_dict(state, assign=True)


def add_a_foreign_group(private: PrivateTraining) -> None:
    private.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def drop_a_group(private: PrivateTraining) -> None:
    private.optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (thaw, "trainable now"),
        (freeze, "frozen now"),
        (replace, "2.weight: expected the modules and parameters"),
        (load_by_assignment, "0.weight: expected the modules and parameters"),
        (add_a_foreign_group, "the model's parameters only"),
        (drop_a_group, "an optimizer that updates it"),
    ],
)
def test_what_is_trained_cannot_change_in_the_middle_of_a_loop(
    change: Callable[[PrivateTraining], None], message: str
) -> None:
    private = private_run(with_frozen_first_layer())
    with pytest.raises(ShuffledDPError, match=message):
        change_within_a_step(private, change, before_the_forward=True)
    assert private.ledger.spent == 1


@pytest.mark.parametrize("before_the_forward", [True, False])
@pytest.mark.parametrize(
    ("change", "name"), [(replace_module, "2.weight"), (add_module, "3.weight")]
)
def test_modules_cannot_change_in_the_middle_of_a_loop(
    change: Callable[[PrivateTraining], None], name: str, before_the_forward: bool
) -> None:
    """Nobody clips what a new module holds: its gradients are those of the records."""
    private = private_run(make_mlp())
    with pytest.raises(ShuffledDPError, match=f"^{name}: expected the modules and parameters"):
        change_within_a_step(private, change, before_the_forward=before_the_forward)
    assert private.ledger.spent == 1


def change_within_a_step(
    private: PrivateTraining,
    change: Callable[[PrivateTraining], None],
    *,
    before_the_forward: bool,
) -> None:
    """Take one step, then change the model inside the loop and go on to the next release."""
    run(private, mlp_case(), num_steps=1)
    stream = private.batches(vectors())
    for count, batch in enumerate(stream):
        if count == 0 and before_the_forward:
            change(private)
        private.backward(classify(private.model, batch))
        if not before_the_forward and private._drawn.current.completes:  # type: ignore[union-attr]
            change(private)
        if private.step():
            return


def test_a_head_outside_the_model_never_gets_plain_gradients() -> None:
    private = private_run(make_mlp())
    head = nn.Linear(3, 3)
    before = head.weight.detach().clone()
    private.optimizer.add_param_group({"params": list(head.parameters())})

    def classify_with_head(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(head(model(batch.x)), batch.y, reduction="none")

    case = Case(make=make_mlp, data=vectors(), loss=classify_with_head)
    with pytest.raises(UnsupportedModuleError, match="trainable parameters are the model's"):
        run(private, case)
    assert torch.equal(head.weight, before)


def test_old_gradients_of_frozen_weights_are_refused() -> None:
    """An optimizer updates by any gradient it finds, whether the parameter is frozen or not."""
    model = make_mlp()
    inputs, labels = vectors().tensors
    F.cross_entropy(model(inputs), labels).backward()
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(InvalidArgumentError, match="gradient of a frozen parameter"):
        private_run(model)
    model.zero_grad()
    run(private_run(model), mlp_case())


class Remembers(nn.Module):
    """A classifier that writes a mean of its inputs somewhere, in one of several ways."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.code = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.write(self, x.detach().mean(0))
        return self.linear(x)


def into_the_buffer(model: Any, mean: torch.Tensor) -> None:
    model.mean.copy_(mean)


def by_replacing_the_buffer(model: Any, mean: torch.Tensor) -> None:
    model.mean = mean


def through_the_buffers_data(model: Any, mean: torch.Tensor) -> None:
    model.mean.data.copy_(mean)


def into_a_new_buffer(model: Any, mean: torch.Tensor) -> None:
    model.register_buffer("fresh", mean)


def into_a_frozen_parameter(model: Any, mean: torch.Tensor) -> None:
    model.code.copy_(mean)


def through_a_frozen_parameters_data(model: Any, mean: torch.Tensor) -> None:
    model.code.data.copy_(mean)


def into_a_trainable_parameter(model: Any, mean: torch.Tensor) -> None:
    model.linear.weight.data.add_(mean)


@pytest.mark.parametrize(
    "write",
    [
        into_the_buffer,
        by_replacing_the_buffer,
        through_the_buffers_data,
        into_a_new_buffer,
        into_a_frozen_parameter,
        through_a_frozen_parameters_data,
        into_a_trainable_parameter,
    ],
)
def test_a_forward_cannot_store_data_in_the_model(
    write: Callable[[Any, torch.Tensor], None],
) -> None:
    private = private_run(Remembers(write))
    with pytest.raises(UnsupportedModuleError):
        run(private, mlp_case())
    assert private.ledger.spent == 0


def test_buffers_are_watched_after_a_change_of_precision_too() -> None:
    private = private_run(Remembers(into_the_buffer))
    private.model.double()
    with pytest.raises(UnsupportedModuleError, match="mean"):
        run(private, mlp_case(torch.float64))
    quiet = private_run(Remembers(lambda model, mean: None))
    quiet.model.double()
    run(quiet, mlp_case(torch.float64))


def test_weights_may_be_changed_by_hand_between_updates() -> None:
    private = private_run(make_mlp(), physical_batch_size=40)
    for batch in private.batches(vectors()):
        private.backward(classify(private.model, batch))
        if private.step():
            with torch.no_grad():
                for parameter in private.model.parameters():
                    parameter.clamp_(-1.0, 1.0)
    assert private.finished


def test_a_batch_norm_woken_in_the_middle_of_a_loop_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)).eval()
    model[1].requires_grad_(False)
    private = private_run(model, physical_batch_size=40)
    stream = private.batches(vectors())
    private.backward(classify(model, next(stream)))
    private.step()
    batch = next(stream)
    model.train()
    with pytest.raises(UnsupportedModuleError, match="batch statistics"):
        classify(model, batch)
    assert private.ledger.spent == 1


def test_replicated_models_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="DataParallel"):
        private_run(nn.DataParallel(make_mlp()))
