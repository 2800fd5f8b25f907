"""LSTM, GRU and RNN in one pass: exact for all their options, packed sequences and given states."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from clipping.compare import assert_exact, assert_same_sums, oracle, run
from clipping.tiny_models import Inputs
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "time first": {"batch_first": False, "bidirectional": True},
    "no biases": {"bias": False},
}
OF_ONE_KIND = {
    "lstm, narrower": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    "rnn, relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}
CASES = {
    **{f"{k}, {o}": (KINDS[k], OPTIONS[o]) for k in KINDS for o in OPTIONS},
    **OF_ONE_KIND,
}
LENGTHS = {"alike": None, "packed": (2, 5, 1), "packed in order": (5, 4, 4)}


class Reader(nn.Module):
    """A recurrent layer whose outputs and last states are read, and whose start is trained."""

    def __init__(self, kind: type[nn.RNNBase], starts: bool = False, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.layer = kind(4, 3, **{"batch_first": True} | options)
        number = self.layer.num_layers * (1 + self.layer.bidirectional)
        widths = [self.layer.proj_size or 3, 3][: 1 + (kind is nn.LSTM)]
        self.starts = nn.ModuleList([nn.Linear(4, number * width) for width in widths if starts])

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        given = [map_(x[:, 0]).unflatten(1, (-1, 3)).transpose(0, 1) for map_ in self.starts]
        hx = None if not given else given[0] if len(given) == 1 else tuple(given)
        first = self.layer.batch_first
        steps: Any = self.before(x) if first else self.before(x).transpose(0, 1)
        if lengths is not None:
            in_order = bool((lengths[:-1] >= lengths[1:]).all())
            steps = pack_padded_sequence(steps, lengths, first, enforce_sorted=in_order)
        out, states = self.layer(steps, hx)
        if isinstance(out, PackedSequence):
            out, _ = pad_packed_sequence(out, first, total_length=x.shape[1])
        out = out if first else out.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([out.flatten(1), *[s.transpose(0, 1).flatten(1) for s in states]], 1)


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(**inputs).sin().square().sum(1)


def sequences(lengths: tuple[int, ...] | None = None, size: int = 3, steps: int = 5) -> Inputs:
    found: Inputs = {"x": torch.randn(size, steps, 4, dtype=torch.float64)}
    return found if lengths is None else found | {"lengths": torch.tensor(lengths)}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
def test_all_options(
    kind: type[nn.RNNBase], options: dict[str, Any], lengths: tuple[int, ...] | None
) -> None:
    torch.manual_seed(0)
    model = Reader(kind, **options).double()
    engine = assert_exact(model, losses, sequences(lengths), 1e-9, clip_norm=0.1)
    assert {row.kind for row in engine.plan()} == {"linear", "recurrent"}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_states_that_are_given(kind: type[nn.RNNBase], lengths: tuple[int, ...] | None) -> None:
    torch.manual_seed(1)
    model = Reader(kind, starts=True, num_layers=2).double()
    assert_exact(model, losses, sequences(lengths), 1e-9, clip_norm=0.1)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "instantiate", "mixed"])
@pytest.mark.parametrize("clip", ["flat", "automatic"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_strategies_and_clips(kind: type[nn.RNNBase], strategy: str, clip: str) -> None:
    torch.manual_seed(2)
    model = Reader(kind, num_layers=2).double()
    assert_exact(model, losses, sequences(), 1e-9, clip_norm=0.1, strategy=strategy, clip=clip)


@pytest.mark.parametrize("names", ["weight_hh", "bias", "_l0", "weight_ih_l1"])
def test_parts_that_are_frozen(names: str) -> None:
    torch.manual_seed(3)
    model = Reader(nn.GRU, num_layers=2).double()
    for name, parameter in model.layer.named_parameters():
        parameter.requires_grad_(names not in name)
    assert_exact(model, losses, sequences(), 1e-9, clip_norm=0.1)


def test_batches_of_many_sizes_and_none() -> None:
    torch.manual_seed(4)
    model = Reader(nn.LSTM, num_layers=2).double()
    engine = ClippingEngine(model, clip_norm=0.1)
    for size, steps in ((1, 6), (3, 3), (2, 1), (0, 4), (5, 6)):
        inputs = sequences(size=size, steps=steps)
        engine.reset()
        got = run(engine, losses, inputs)
        if size:
            assert_same_sums(got, oracle(model, losses, inputs, 0.1).clipped_sum, 1e-9)


class Twice(nn.Module):
    """Reads a sequence, and then what it made of it, perhaps without keeping what lies between."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.layer, self.checkpoints = nn.LSTM(4, 4, batch_first=True), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.checkpoints:
                x = checkpoint(lambda x: self.layer(x)[0], x, use_reentrant=False)
            else:
                x = self.layer(x)[0]
        return x.flatten(1)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_layer_that_is_called_twice(checkpoints: bool) -> None:
    torch.manual_seed(5)
    assert_exact(Twice(checkpoints).double(), losses, sequences(), 1e-9, clip_norm=0.1)


def test_dropout_between_layers_is_that_of_pytorch() -> None:
    model = Reader(nn.LSTM, num_layers=3, dropout=0.5)
    x = torch.randn(3, 5, 4)
    torch.manual_seed(6)
    expected = model(x)
    torch.manual_seed(6)
    with ClippingEngine(model):
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, model(x), rtol=1e-4, atol=1e-6)


def test_it_is_not_run_one_by_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(ClippingEngine(Reader(nn.GRU).double()), losses, sequences())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_inside_a_compiled_model() -> None:
    """The compiler leaves it out: one more piece of the model's graph."""
    torch.manual_seed(7)
    model = Reader(nn.GRU).double()
    compiled = torch.compile(model, backend="aot_eager")
    engine = ClippingEngine(model, clip_norm=0.1)
    for _ in range(3):
        inputs = sequences()
        engine.reset()
        with engine:
            engine.backward(losses(compiled, inputs))
        assert_same_sums(engine.clipped_sum(), oracle(model, losses, inputs, 0.1).clipped_sum, 1e-9)


class Sorting(Reader):
    """Sorts the sequences by hand, so that the layer sees the samples in another order."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        assert lengths is not None
        order = lengths.argsort(descending=True)
        found = super().forward(x[order], lengths[order])
        return found[order.argsort()]


class Unbatched(Reader):
    """Takes the samples for time steps of one sequence."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.layer(self.before(x)[:, 0])[0]


MIXING: dict[str, Callable[[], Any]] = {
    "sorted by hand": lambda: (Sorting(nn.LSTM), (2, 5, 1)),
    "taken for time steps": lambda: (Unbatched(nn.LSTM), None),
    "the batch second": lambda: (Wrong(nn.LSTM), None),
}


class Wrong(Reader):
    """Gives time first to a layer that wants the batch first, so that samples follow each other."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.layer(self.before(x).transpose(0, 1))[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("case", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("size", [3, 5])
def test_samples_that_meet_or_change_places_are_refused(case: Callable[[], Any], size: int) -> None:
    model, lengths = case()
    lengths = None if lengths is None else (*lengths, 4, 3)[:size]
    with pytest.raises(UnsupportedModuleError):
        run(ClippingEngine(model.double()), losses, sequences(lengths, size))
