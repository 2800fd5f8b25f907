"""What else a loss trains, how it is scaled, and whether it is the one that was handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd import make_private
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.training import PrivateTraining

RECORDS, WIDTH, CLASSES = 200, 6, 3


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Linear(WIDTH, 10), nn.Tanh(), nn.Dropout(dropout)
    return nn.Sequential(*body, nn.Linear(10, CLASSES))


def vectors() -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (RECORDS,), generator=drawn)
    return torch.utils.data.TensorDataset(torch.randn(RECORDS, WIDTH, generator=drawn), labels)


def start(model: nn.Module | None = None, **changes: Any) -> PrivateTraining:
    model = mlp() if model is None else model
    usual: dict[str, Any] = {
        "dataset_size": RECORDS, "expected_batch_size": 20, "num_steps": 4, "delta": 1e-3,
        "noise_multiplier": 1.0, "shuffle": "off", "physical_batch_size": 16,
    }  # fmt: skip
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.05), **(usual | changes))


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


Back = Callable[[PrivateTraining, Tensor], object]
WAYS: dict[str, Back] = {
    "private.backward": lambda private, losses: private.backward(losses),
    "losses.sum().backward": lambda private, losses: losses.sum().backward(),
    "torch.autograd.backward": lambda private, losses: torch.autograd.backward([losses.sum()]),
    "engine.backward": lambda private, losses: private.engine.backward(losses),
}


def go(private: PrivateTraining, loss: Any, back: Back = WAYS["private.backward"]) -> None:
    for batch in private.batches(vectors()):
        back(private, loss(private.model, batch))
        private.step()


# --- what else is trained ------------------------------------------------------------------------


def temperature(leaf: Tensor) -> Any:
    return lambda model, batch: F.cross_entropy(model(batch.x) * leaf[0], batch.y, reduction="none")


def prompt(leaf: Tensor) -> Any:
    return lambda model, batch: F.cross_entropy(model(batch.x + leaf), batch.y, reduction="none")


def penalty(leaf: Tensor) -> Any:
    return lambda model, batch: plain(model, batch) + leaf.square().sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [temperature, prompt, penalty])
@pytest.mark.parametrize("kind", [nn.Parameter, lambda x: x.requires_grad_()])
def test_what_is_no_parameter_of_the_model_is_not_trained(make: Any, kind: Any, way: str) -> None:
    private, leaf = start(), kind(torch.ones(WIDTH))
    with pytest.raises(UnsupportedModuleError, match=r"tensor of shape \(6,\) in the"):
        go(private, make(leaf), WAYS[way])
    assert private.ledger.spent == 0
    assert leaf.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_comes_late_is_refused_when_it_comes(way: str) -> None:
    private, leaf = start(), nn.Parameter(torch.ones(WIDTH))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (temperature(leaf) if private.steps_taken else plain)(model, batch)

    with pytest.raises(UnsupportedModuleError, match="in the loss that requires gradients"):
        go(private, loss, WAYS[way])
    assert private.ledger.spent == 1
    assert leaf.grad is None


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, prompt: Tensor | None = None) -> Tensor:
        return self.body(x if prompt is None else x + prompt)


@pytest.mark.parametrize("kind", [nn.Parameter, lambda x: x.requires_grad_()])
def test_a_prompt_that_is_an_argument_is_refused(kind: Any) -> None:
    private, leaf = start(Prompted()), kind(torch.ones(1, WIDTH))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x, leaf), batch.y, reduction="none")

    with pytest.raises(UnsupportedModuleError, match="inputs of the model"):
        go(private, loss)
    assert leaf.grad is None


def test_what_trains_nothing_passes() -> None:
    """Rows that require gradients, numbers that do not, other models, and a run's own checks."""
    private, other = start(check_rate=1.0, loss=plain), nn.Linear(WIDTH, CLASSES)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        plain(other, batch).sum().backward()
        logits = model(batch.x.clone().requires_grad_()) * torch.ones(CLASSES)
        return F.cross_entropy(logits, batch.y, reduction="none")

    original = torch.autograd.backward
    go(private, loss, WAYS["losses.sum().backward"])
    assert private.ledger.spent == 4
    assert other.weight.grad is not None
    assert torch.autograd.backward is original
    # Nor is the compiler left off, where a batch is compared when the next one begins.
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_baseline_engine_and_compiled_models_are_looked_at_too(compiled: bool) -> None:
    torch._dynamo.reset()
    if not compiled:
        pytest.importorskip("opacus")
    model, leaf = mlp(), nn.Parameter(torch.ones(WIDTH))
    private = start(model, **({} if compiled else {"method": "opacus"}))
    called = torch.compile(model, backend="aot_eager") if compiled else model
    way = WAYS["losses.sum().backward" if compiled else "private.backward"]
    with pytest.raises(UnsupportedModuleError, match="in the loss that requires gradients"):
        go(private, lambda _, batch: temperature(leaf)(called, batch), way)
    assert leaf.grad is None


# --- how it is scaled ----------------------------------------------------------------------------


class Numbers(nn.Module):
    """Returns the mean of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.body(x), y, reduction="none")
        return losses.sum() / len(losses)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by 4": lambda loss: loss / 4,
    "multiplied by 3": lambda loss: 3.0 * loss,
    "multiplied by 2": lambda loss: torch.tensor(8.0) * loss / 4,
    "as by a GradScaler": lambda loss: torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(loss),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["of rows", "of the model"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_mean_that_is_scaled_is_refused_before_anything_is_spent(
    scale: str, own: bool, alone: bool
) -> None:
    private = start(Numbers() if own else mlp(), loss_reduction="mean")
    loss = (lambda model, batch: model(batch.x, batch.y)) if own else mean
    back = (lambda _, loss: loss.backward()) if alone else WAYS["private.backward"]
    with pytest.raises(InvalidArgumentError, match=scale):
        go(private, lambda *of: SCALES[scale](loss(*of)), back)
    assert private.ledger.spent == 0


@pytest.mark.parametrize("own", [False, True], ids=["of rows", "of the model"])
def test_a_mean_written_as_a_sum_over_its_size_passes(own: bool) -> None:
    private = start(Numbers() if own else mlp(), loss_reduction="mean")
    loss: Any = lambda model, batch: plain(model, batch).sum() / len(batch.y)  # noqa: E731
    go(private, (lambda model, batch: model(batch.x, batch.y)) if own else loss)
    assert private.ledger.spent == 4


@pytest.mark.parametrize("loss", [mean, lambda *of: plain(*of).mean(), lambda *of: mean(*of) / 2])
def test_a_mean_that_is_not_declared_is_refused(loss: Any) -> None:
    private = start()
    with pytest.raises(InvalidArgumentError, match=r"(a mean|divided by 2), clipped"):
        go(private, loss, lambda _, loss: loss.backward())
    assert private.ledger.spent == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_scaler_is_refused_by_name(way: str) -> None:
    private, scaler = start(), torch.amp.GradScaler("cpu")
    with pytest.raises(InvalidArgumentError, match="GradScaler"):
        go(private, lambda *of: scaler.scale(plain(*of)), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_that_is_scaled_is_another_clip_and_said(way: str) -> None:
    private = start()
    for batch in private.batches(vectors(), num_steps=1):
        with pytest.warns(UserWarning, match="divided by 4 before the clip"):
            WAYS[way](private, plain(private.model, batch) / 4)
        private.step()
    assert private.ledger.spent == 1


# --- whether it is the one that was handed over --------------------------------------------------


def mixed(model: nn.Module, batch: Any) -> Tensor:
    logits = model(0.5 * batch.x + 0.5 * batch.x.flip(0))
    return F.cross_entropy(logits, batch.y, reduction="none")


def centred(model: nn.Module, batch: Any) -> Tensor:
    losses = plain(model, batch)
    return losses / losses.detach().mean()


def ranked(model: nn.Module, batch: Any) -> Tensor:
    losses = plain(model, batch)
    return losses * (1 + 0.04 * losses.detach().argsort().argsort() / len(losses))


def of_the_same_value(model: nn.Module, batch: Any) -> Tensor:
    losses = plain(model, batch)
    return losses + 10 * batch.x.mean().abs() * (losses - losses.detach())


NOT_COMPARED = "not checked: that the loss trained on is the one handed over"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("trained", [mixed, centred, ranked, of_the_same_value])
def test_a_loop_that_trains_on_another_loss_is_stopped(trained: Any, dropout: float) -> None:
    private = start(mlp(dropout), loss=plain)
    with pytest.raises(InvalidArgumentError, match="away from those of loss="):
        go(private, trained)
    assert private.ledger.spent == 0


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_loss_that_was_handed_over_is_compared(
    dropout: float, half: bool, reduction: str
) -> None:
    loss = plain if reduction == "sum" else mean
    private = start(mlp(dropout), loss=loss, check_rate=1.0, loss_reduction=reduction)

    def trained(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return loss(model, batch)

    go(private, lambda *of: (private.card(), trained(*of))[1])
    assert private.ledger.spent == 4
    assert NOT_COMPARED not in str(private.card())


def with_draws(model: nn.Module, batch: Any) -> Tensor:
    torch.randperm(5)
    return plain(model, batch)


@pytest.mark.parametrize(
    ("trained", "way", "why"),
    [
        (with_draws, "private.backward", "draw other random numbers"),
        (plain, "losses.sum().backward", "a loss went backward by itself"),
        (plain, "engine.backward", "a loss went backward by itself"),
    ],
)
def test_what_cannot_be_compared_is_said_and_listed(
    trained: Any, way: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shuffled_dpsgd.runtime.notices._said", set())
    private = start(loss=plain, num_steps=2)
    with pytest.warns(RuntimeWarning, match=f"could not be compared.*{why}"):
        go(private, trained, WAYS[way])
    line = next(line for line in str(private.card()).splitlines() if NOT_COMPARED in line)
    assert why in line


def test_a_model_that_is_another_when_run_again_is_listed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * (1.5 if torch.is_grad_enabled() else 1.0)

    private = start(Counting(), loss=plain)
    go(private, plain)
    assert "something else when it is run once more" in str(private.card())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_listed() -> None:
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    private = start(model, loss=plain)
    go(private, lambda _, batch: plain(compiled, batch))
    assert "could be followed" in str(private.card())
