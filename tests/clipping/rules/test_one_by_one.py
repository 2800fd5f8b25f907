"""Modules that vmap cannot run are run one sample after the other: exact, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping.compare import assert_exact, assert_same_sums, oracle, run
from clipping.tiny_models import Inputs, llama, mixtral
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


class Cubed(torch.autograd.Function):
    """A function with a backward of its own, and no word about vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def with_hook(x: Tensor) -> Tensor:
    """vmap runs hooks on tensors for nobody; the outputs are the same."""
    out = x * 1.0
    if out.requires_grad:
        out.register_hook(lambda grad: grad / 2)
    return out * 1.0


def by_length(x: Tensor) -> Tensor:
    """Does one thing or another with each sample."""
    return torch.stack([row.tanh() if row.sum() > 0 else row.sin() for row in x])


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "a backward of its own": Cubed.apply,
    "a hook on a tensor": with_hook,
    "a checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "a branch": by_length,
}


class Using(nn.Module):
    """Multiplies by a bare parameter and does something that vmap cannot."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x * self.scale)


def with_a_forward_of_its_own(kind: type[nn.RNNBase]) -> type[nn.RNNBase]:
    """What has a rule loses it once its forward may do anything."""
    return type("Own", (kind,), {"forward": lambda self, x: kind.forward(self, x)})


OWN_LSTM, OWN_GRU, OWN_RNN = map(with_a_forward_of_its_own, (nn.LSTM, nn.GRU, nn.RNN))


class Recurrent(nn.Module):
    """Reads the outputs of a recurrent layer and its last states, whose batch comes second."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(4, 4), layer

    def forward(self, x: Tensor) -> Tensor:
        out, states = self.layer(self.before(x))
        last = states[0] if isinstance(states, tuple) else states
        return torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1)


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


def numbers(*shape: int) -> Inputs:
    return {"x": torch.randn(*shape, dtype=torch.float64)}


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("size", [1, 3])
def test_whatever_vmap_cannot_run(name: str, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Using(USES[name]), nn.Linear(4, 2)).double()
    engine = assert_exact(model, losses, numbers(size, 5, 4), 1e-9, clip_norm=0.1)
    assert {row.kind for row in engine.plan()} == {"linear", "generic"}


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
@pytest.mark.parametrize(
    "layer",
    [
        lambda: OWN_LSTM(4, 3, num_layers=2, batch_first=True),
        lambda: OWN_GRU(4, 3, bidirectional=True, batch_first=True),
        lambda: OWN_RNN(4, 3, batch_first=True),
    ],
    ids=["LSTM", "GRU", "RNN"],
)
def test_recurrent_layers_with_their_states(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = Recurrent(layer()).double()
    engine = ClippingEngine(model, clip_norm=0.1)
    for size in (1, 3, 2, 1, 5):
        inputs = numbers(size, 6, 4)
        engine.reset()
        got = run(engine, losses, inputs)
        assert_same_sums(got, oracle(model, losses, inputs, 0.1).clipped_sum, 1e-9)


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "instantiate"])
def test_other_strategies_and_clips(strategy: str) -> None:
    torch.manual_seed(2)
    model = Recurrent(OWN_LSTM(4, 3, batch_first=True)).double()
    assert_exact(model, losses, numbers(3, 5, 4), 1e-9, clip_norm=0.1, strategy=strategy)


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
def test_experts_that_are_asked_one_after_the_other() -> None:
    torch.manual_seed(3)
    case = mixtral().to(torch.float64)
    case.model.set_experts_implementation("eager")
    assert_exact(case.model, case.losses, case.inputs, 1e-9, clip_norm=0.5)


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
@pytest.mark.parametrize("name", ["LoHa", "LoKr", "OFT", "HRA", "IA3"])
def test_adapters_other_than_lora(name: str) -> None:
    import peft

    torch.manual_seed(4)
    case = llama(tied=True)
    sizes = {
        "OFT": {"r": 2, "oft_block_size": 0},
        "IA3": {"feedforward_modules": ["down_proj"]},
    }.get(name, {"r": 2})
    config = getattr(peft, f"{name}Config")(target_modules=["q_proj", "down_proj"], **sizes)
    model = peft.get_peft_model(case.model, config).double()
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        nn.init.normal_(parameter, std=0.1)
    assert_exact(model, case.losses, case.inputs, 1e-9, clip_norm=0.5)


def test_it_is_said_once() -> None:
    engine = ClippingEngine(nn.Sequential(nn.Linear(4, 4), Using(Cubed.apply)).double())
    with pytest.warns(RuntimeWarning, match=r"^1: .*cannot run Using.*one sample after the other"):
        run(engine, losses, numbers(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(engine, losses, numbers(2, 4))


class Counting(nn.Module):
    """Remembers what it saw, which a loop would have it do once per sample."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.seen = nn.Buffer(torch.zeros(()))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.in_place:
            self.seen.add_(1)
        elif self.training:
            self.seen = self.seen + 1
        return Cubed.apply(x * self.scale)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_module_with_a_memory_is_refused_and_left_as_it_was(in_place: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(in_place=in_place))
    buffer, before = model[1].seen, float(model[1].seen)
    with pytest.raises(UnsupportedModuleError, match=r"1: .*buffers that its forward changes"):
        run(ClippingEngine(model), losses, {"x": torch.randn(3, 4)})
    assert model[1].seen is buffer
    assert float(buffer) == before


class Mixing(Using):
    """Lets samples see each other, in a way that vmap cannot run."""

    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply((x - x.mean(0)) * self.scale)


def test_samples_that_meet_are_still_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Mixing(Cubed.apply))
    with pytest.raises(UnsupportedModuleError):
        run(ClippingEngine(model), losses, {"x": torch.randn(3, 4)})
