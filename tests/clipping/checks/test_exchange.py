"""A sample's outputs and gradient stay where they are among others; planted faults are stopped.

None of the models here is of a kind that the check was written for: it knows nothing of running
means, mix-up, checkpointing or folding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.checks import check_turns
from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.runtime.replay import Rerun

DISAGREES = "whatever the others are|depend on that sample"
WIDTH, CLASSES = 6, 3


class Net(nn.Module):
    """Two layers with something in between, in training mode only where it says so."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, CLASSES)
        self.between = between
        self.mean: Any = 0.0
        self.own = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(4)
        self.calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self, self.drop(torch.tanh(self.first(x)))))


def train(
    model: nn.Module,
    *,
    batches: int = 3,
    size: int = 5,
    dtype: torch.dtype = torch.float64,
    losses: Callable[[Any], Tensor] | None = None,
    **options: Any,
) -> ClippingEngine:
    """A few batches through one engine."""
    engine = ClippingEngine(model.to(dtype), **options)
    for step in range(batches):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(size, 4, WIDTH, generator=generator, dtype=dtype)
        with engine:
            output = model(x)
            engine.backward(losses(output) if losses else output.square().sum((1, 2)))
        engine.clipped_sum()
    return engine


# --- what passes -------------------------------------------------------------------------------


def plain(net: Net, h: Tensor) -> Tensor:
    return h


def noisy_rows(net: Net, h: Tensor) -> Tensor:
    return h + 0.1 * torch.randn_like(h)


def own_noise(net: Net, h: Tensor) -> Tensor:
    return h + 0.1 * torch.randn(h.shape, generator=net.own, dtype=h.dtype)


def layer_drop(net: Net, h: Tensor) -> Tensor:
    return h if torch.rand(()) < 0.5 else 2.0 * h


def python_layer_drop(net: Net, h: Tensor) -> Tensor:
    return h if random.random() < 0.5 else 2.0 * h


def numpy_layer_drop(net: Net, h: Tensor) -> Tensor:
    return h * (1.0 + float(np.random.rand()))  # noqa: NPY002


def counts_its_calls(net: Net, h: Tensor) -> Tensor:
    net.calls += 1
    return h


def attention(net: Net, h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.4)


def checkpointed(net: Net, h: Tensor) -> Tensor:
    return checkpoint(lambda z: F.dropout(torch.tanh(z), 0.5), h, use_reentrant=False)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "between",
    [
        plain,
        noisy_rows,
        own_noise,
        layer_drop,
        python_layer_drop,
        numpy_layer_drop,
        counts_its_calls,
        attention,
        checkpointed,
    ],
)
def test_independent_samples_pass(between: Callable[[Net, Tensor], Tensor], dropout: float) -> None:
    engine = train(Net(between, dropout), check_rate=1.0)
    assert engine.num_checked == 6


def test_batches_checked_for_their_shape_are_counted_apart() -> None:
    net = Net(plain).double()
    engine = ClippingEngine(net, check_rate=0.0)
    for size in (5, 1, 5):
        with engine:
            engine.backward(net(torch.randn(size, 4, WIDTH).double()).square().sum((1, 2)))
        engine.clipped_sum()
    assert (engine.num_checked, engine.num_checked_by_coin) == (3, 2)
    assert train(Net(plain), check_rate=1.0).num_checked_by_coin == 6


def keeps_its_inputs(net: Net, h: Tensor) -> Tensor:
    net.seen += [h.detach()] if net.training else []
    return h


def test_the_check_leaves_no_trace() -> None:
    net = Net(own_noise, dropout=0.5).double()
    counted = Net(counts_its_calls).double()
    net.first.weight.grad = kept = torch.ones_like(net.first.weight)
    before = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002

    def run(rate: float) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        net.own.manual_seed(1)
        engine = train(net, check_rate=rate)
        return engine.clipped_sum()["first.weight"].clone(), torch.rand(3), net.own.get_state()

    once, always = run(0.0), run(1.0)
    for one, other in zip(once, always, strict=True):
        assert torch.equal(one, other)
    train(counted, check_rate=1.0)
    train(counted, check_rate=1.0)
    lists = Net(keeps_its_inputs).double()
    train(lists, check_rate=1.0, batches=3)
    assert len(lists.seen) == 3
    assert net.first.weight.grad is kept
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


# --- what is stopped ---------------------------------------------------------------------------


def running_mean(net: Net, h: Tensor) -> Tensor:
    if net.training:
        net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
        h = h - net.mean
    return h


def stale_mean(net: Net, h: Tensor) -> Tensor:
    shifted = h - net.mean
    net.mean = 0.5 * net.mean + 0.5 * h.detach().mean((0, 1))
    return shifted


def remembered(net: Net, h: Tensor) -> Tensor:
    net.seen.append(h.detach())
    return h - 0.1 * net.seen[-2].mean(0) if len(net.seen) > 1 else h


def own_mix_up(net: Net, h: Tensor) -> Tensor:
    return h + 0.5 * h[torch.randperm(len(h), generator=net.own)]


def numpy_mix_up(net: Net, h: Tensor) -> Tensor:
    return h + 0.5 * h[torch.from_numpy(net.numpy.permutation(len(h)))]


def python_mix_up(net: Net, h: Tensor) -> Tensor:
    return h + 0.5 * h[random.sample(range(len(h)), len(h))]


def mixing_beside_noise(net: Net, h: Tensor) -> Tensor:
    return h + 0.1 * h.mean(0) + 0.01 * torch.randn_like(h)


def mixing_in_training(net: Net, h: Tensor) -> Tensor:
    return h - h.mean(0) if net.training else h


def own_generator_noise_of_the_batch(net: Net, h: Tensor) -> Tensor:
    return h * (1.0 + float(net.numpy.random())) + h.roll(1, 0)


STOPPED = [
    running_mean,
    stale_mean,
    remembered,
    own_mix_up,
    numpy_mix_up,
    python_mix_up,
    mixing_beside_noise,
    mixing_in_training,
    own_generator_noise_of_the_batch,
]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("between", STOPPED)
def test_samples_that_meet_are_stopped(
    between: Callable[[Net, Tensor], Tensor], dropout: float
) -> None:
    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(Net(between, dropout))


def test_rare_mix_up_is_stopped_when_it_happens() -> None:
    def rarely(net: Net, h: Tensor) -> Tensor:
        return h.roll(1, 0) if torch.rand(()) < 0.2 else h

    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(Net(rarely), batches=40, check_rate=1.0)


class OneByOne(nn.Module):
    """Its own parameter beside a layer's: samples are run with copies of it."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(0.5)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(x * self.scale)
        return h + h.mean(0) if self.mixes else h


def test_an_engine_that_draws_in_another_order_is_not_blamed() -> None:
    """A module may be run on one sample after the other; two runs without the engine agree."""
    net = nn.Sequential(OneByOne(mixes=False), nn.Linear(WIDTH, CLASSES))
    assert train(net, batches=2, strategy="instantiate").num_checked > 0
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), OneByOne(mixes=True))
    with pytest.raises(UnsupportedModuleError):
        train(net, batches=2, strategy="instantiate")


def test_a_gradient_that_is_not_a_number_alone_is_a_disagreement(monkeypatch: Any) -> None:
    observe = Rerun.observe

    def no_number(*args: Any, **options: Any) -> Any:
        found = observe(*args, **options)
        return replace(found, grads={name: g * torch.nan for name, g in found.grads.items()})

    monkeypatch.setattr(Rerun, "observe", no_number)
    with pytest.raises(UnsupportedModuleError, match="whatever the others are"):
        train(Net(plain), batches=1)


class OutputsOf(nn.Module):
    """Whatever is done to the outputs of a plain model."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.end = nn.Linear(WIDTH, CLASSES), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x))


def two_of_many(z: Tensor) -> Tensor:
    rows = list(range(len(z)))
    rows[0], rows[-1] = rows[-1], rows[0]
    return z + 0.5 * z.detach()[rows]


@pytest.mark.parametrize(
    "end",
    [
        lambda z: z - z.detach().mean(0),
        lambda z: z / z.detach().std(0),
        lambda z: z / len(z),
        lambda z: z + (z - z.detach()) * z.detach().square().mean(),
        lambda z: torch.where(z.detach() > z.detach().median(), z, 0.1 * z),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_reaches_a_sample_without_a_gradient_is_stopped(
    end: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(OutputsOf(end), batches=1, size=8, dtype=dtype)


def test_two_samples_of_many_that_meet_are_found_where_every_batch_is_checked() -> None:
    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(OutputsOf(two_of_many), batches=60, size=32, check_rate=1.0)


class OwnPositions(nn.Embedding):
    """Looks up the first positions, and takes no tensor at all."""

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length))


class WithOwnPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = OwnPositions(8, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.positions(x.shape[1]))


def test_outputs_of_another_shape_than_without_the_engine_are_refused_by_name() -> None:
    """A single sample hides that every sample was given positions of its own."""
    net = WithOwnPositions().double()
    engine = ClippingEngine(net)
    with engine:
        engine.backward(net(torch.randn(1, 5, WIDTH).double()).square().sum((1, 2)))
    engine.clipped_sum()
    with engine:
        losses = net(torch.randn(4, 1, WIDTH).double()).square().flatten(1).sum(1)
        with pytest.raises(UnsupportedModuleError, match="when the model is run once more"):
            engine.backward(losses)


def test_nothing_is_handed_out_of_a_batch_that_was_stopped() -> None:
    net = Net(stale_mean).double()
    engine = ClippingEngine(net)
    with engine:
        losses = net(torch.randn(4, 2, WIDTH, dtype=torch.float64)).square().sum((1, 2))
        losses.sum().backward()
        with pytest.raises(UnsupportedModuleError, match="keep nothing from one forward"):
            engine.clipped_sum()
        assert engine.sample_norms.numel() == 0
        assert all(float(total.abs().sum()) == 0 for total in engine.clipped_sum().values())


@dataclass
class Answer:
    logits: Tensor
    note: str = ""


WRAPPINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (lambda z: Answer(z), lambda out: out.logits),
    "namespace": (lambda z: SimpleNamespace(logits=z), lambda out: out.logits),
    "nested": (lambda z: {"a": [SimpleNamespace(b=(z,))]}, lambda out: out["a"][0].b[0]),
    "second axis": (lambda z: z.transpose(0, 1), lambda out: out.transpose(0, 1)),
    "hidden and head": (lambda z: (z, z.square()), lambda out: out[0] + out[1]),
}


class Wrapped(Net):
    def __init__(self, wrap: Callable[[Tensor], Any], between: Any = plain) -> None:
        super().__init__(between)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


@pytest.mark.parametrize("name", WRAPPINGS)
def test_outputs_of_any_shape_are_followed(name: str) -> None:
    wrap, logits = WRAPPINGS[name]
    good = train(Wrapped(wrap), losses=lambda out: logits(out).square().sum((1, 2)))
    assert good.num_checked > 0
    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(
            Wrapped(lambda z: wrap(z - z.mean(0))),
            losses=lambda out: logits(out).square().sum((1, 2)),
        )


def test_lists_of_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(Wrapped(lambda z: list(z)), losses=lambda out: torch.stack(out).square().sum((1, 2)))


@pytest.mark.parametrize("name", WRAPPINGS)
def test_contrastive_losses_are_refused_whatever_the_output(name: str) -> None:
    wrap, logits = WRAPPINGS[name]

    def contrastive(out: Any) -> Tensor:
        flat = logits(out).flatten(1)
        return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)), reduction="none")

    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        train(Wrapped(wrap), losses=contrastive)


def test_a_loss_that_bypasses_the_outputs_is_refused() -> None:
    class Bypassed(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = super().forward(x)
            return self.hidden.detach()

    net = Bypassed(plain)
    with pytest.raises(UnsupportedModuleError, match="return what the loss needs"):
        train(net, losses=lambda out: net.hidden.square().sum((1, 2)))


class Several(nn.Module):
    """One layer called several times under re-entrant checkpointing."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(self.calls):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return torch.tanh(x)


@pytest.mark.parametrize("options", [{}, {"strategy": "ghost"}, {"clip": "per-layer"}])
def test_reentrant_checkpoints_of_a_module_called_twice(options: dict[str, Any]) -> None:
    """Exact, or refused."""
    try:
        engine = train(Several(2), clip_norm=1e-3, size=1, batches=1, **options)
    except UnsupportedModuleError:
        return
    norms = [float(total.norm()) for total in engine.clipped_sum().values()]
    assert sum(norm**2 for norm in norms) ** 0.5 <= 1e-3 * (1 + 1e-6)


class Positions(nn.Module):
    """Hands out its own parameter, of which the parent takes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, WIDTH))

    def forward(self) -> Tensor:
        return self.table


TAKES = {
    "index": lambda table, T: table[0, :T],
    "slice": lambda table, T: table[:, :T],
    "select": lambda table, T: table.select(0, 0)[:T],
    "unbind": lambda table, T: table.unbind(0)[0][:T],
    "flatten": lambda table, T: table.flatten(0, 1)[:T],
    "first": lambda table, T: table[:1, :T],
}


@pytest.mark.parametrize("first_size", [1, 3])
@pytest.mark.parametrize("name", TAKES)
def test_parameters_handed_out_to_a_parent(name: str, first_size: int) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(x + TAKES[name](self.positions(), x.shape[1])))

    torch.manual_seed(0)
    model = Parent().double()
    engine = ClippingEngine(model, clip_norm=1e-2)
    try:
        for size in (first_size, 3, 4):
            x = torch.randn(size, 5, WIDTH, dtype=torch.float64)
            engine.reset()
            with engine:
                engine.backward(model(x).square().sum((1, 2)))
            alone = []
            for sample in x:
                loss = model(sample[None]).square().sum()
                grads = torch.autograd.grad(loss, list(model.parameters()))
                norm = sum(float(g.square().sum()) for g in grads) ** 0.5
                alone.append([g * min(1.0, 1e-2 / norm) for g in grads])
            for got, *wanted in zip(engine.clipped_sum().values(), *alone, strict=True):
                torch.testing.assert_close(got, sum(wanted), rtol=1e-9, atol=1e-12)
    except UnsupportedModuleError:
        return


class DropsPadding(nn.Module):
    """Takes the padding out before its layer, and puts it back behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = mask.bool()
        rows = self.inner(torch.tanh(self.embed(x))[kept])
        return x.new_zeros(*mask.shape, CLASSES).index_put((kept,), rows)


@pytest.mark.parametrize("padded", [None, 7])
@pytest.mark.parametrize("schedule", [[(4, 4), (4, 4), (3, 5)], [(4, 4), (4, 4), (1, 7)]])
def test_folded_rows_are_not_attributed_by_count(
    schedule: list[tuple[int, int]], padded: int | None
) -> None:
    model = DropsPadding().double()
    engine = ClippingEngine(model)

    def run() -> None:
        for lengths in schedule:
            mask = torch.arange(padded or max(lengths)) < torch.tensor(lengths)[:, None]
            x = torch.randn(*mask.shape, WIDTH, dtype=torch.float64)
            with engine:
                engine.backward(model(x, mask).square().sum((1, 2)))

    with pytest.raises(UnsupportedModuleError):
        run()


def test_a_first_batch_in_evaluation_mode_hides_nothing() -> None:
    net = Net(mixing_in_training).double().eval()
    engine = ClippingEngine(net)
    x = torch.randn(4, 4, WIDTH, dtype=torch.float64)
    with engine:
        engine.backward(net(x).square().sum((1, 2)))
    net.train()
    with pytest.raises(UnsupportedModuleError, match=DISAGREES), engine:
        engine.backward(net(x).square().sum((1, 2)))


class ScaledConv(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 3.0 * super()._conv_forward(input, weight, bias)


class HalvedOnAccess(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return 0.5 * value if name == "weight" else value


class OtherWeights(nn.Module):
    """Calls its layer with weights that are not the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        other = {"weight": self.layer.weight.detach() * 2, "bias": self.layer.bias}
        return functional_call(self.layer, other, (x,))


REPLACED: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(ScaledConv(4, CLASSES, 1)),
    "weight on access": lambda: nn.Sequential(HalvedOnAccess(WIDTH, CLASSES)),
    "functional call inside": OtherWeights,
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_function_that_is_not_the_layers_own_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = REPLACED[name]().double()
    engine = ClippingEngine(model, clip_norm=1e-3)
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    with pytest.raises(UnsupportedModuleError), engine:
        engine.backward(model(x).square().sum((1, 2)))


def test_a_call_with_other_weights_than_the_models_is_refused() -> None:
    net = Net(plain).double()
    engine = ClippingEngine(net)
    other = {name: 2.0 * p.detach() for name, p in net.named_parameters()}
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    with pytest.raises(UnsupportedModuleError), engine:
        engine.backward(functional_call(net, other, (x,)).square().sum((1, 2)))


def test_a_nan_in_each_half_of_the_first_batch_disarms_nothing() -> None:
    net = Net(mixing_beside_noise).double()
    engine = ClippingEngine(net)

    def run() -> None:
        for step in range(3):
            x = torch.randn(4, 4, WIDTH, dtype=torch.float64)
            if step == 0:
                x[0], x[3] = torch.nan, torch.nan
            with engine:
                engine.backward(net(x).square().sum((1, 2)))

    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        run()


def test_small_mixing_is_found_in_half_precision() -> None:
    def a_tenth_of_the_batch(net: Net, h: Tensor) -> Tensor:
        return h + 0.1 * h.sum(0)

    net = Net(a_tenth_of_the_batch)
    engine = ClippingEngine(net)
    x = torch.randn(8, 4, WIDTH)

    def run() -> None:
        with engine, torch.autocast("cpu", dtype=torch.float16):
            engine.backward(net(x).float().square().sum((1, 2)))

    with pytest.raises(UnsupportedModuleError, match=DISAGREES):
        run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_given_its_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net(plain, dropout=0.5)
    engine = ClippingEngine(model, check_rate=1.0)
    for _ in range(20):
        with engine, torch.autocast("cpu", dtype):
            engine.backward(model(torch.randn(5, 4, WIDTH)).float().square().sum((1, 2)))
        engine.clipped_sum()
    assert engine.num_checked == 40


def test_checks_at_random_keep_to_their_share_of_the_time(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(check_turns.time, "perf_counter", lambda: now[0])

    def turns(rate: float) -> CheckTurns:
        found = CheckTurns(rate)
        found.note_checked("seen")
        found.draws = SimpleNamespace(random=lambda: 0.0)  # type: ignore[assignment]
        return found

    usual, often = turns(1 / 256), turns(0.5)
    assert usual.is_due("seen")
    with usual.time.spent():
        now[0] += 1.0
    often.time.seconds = 1e9
    now[0] = 249.0
    assert not usual.is_due("seen")
    assert usual.is_due("not seen")
    now[0] = 251.0
    assert usual.is_due("seen")
    assert often.is_due("seen")


def test_the_rate_must_be_a_share() -> None:
    with pytest.raises(InvalidArgumentError, match="check_rate"):
        ClippingEngine(Net(plain), check_rate=1.5)
