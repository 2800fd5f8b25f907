"""`torch.compile(fullgraph=True)` of the model: no graph break, the same sums."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping.compare import assert_same_sums, run
from clipping.tiny_models import CASES, Case, Inputs, gpt2
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.rules import linear
from shuffled_dpsgd.errors import UnsupportedModuleError

# Warnings that torch gives its own compiler, whatever is compiled.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def compiled_run(
    case: Case, backend: str, inputs: Inputs | None = None, **options: object
) -> ClippingEngine:
    torch._dynamo.reset()
    compiled = torch.compile(case.model, fullgraph=True, backend=backend)
    engine = ClippingEngine(case.model, clip_norm=0.5, **options)  # type: ignore[arg-type]
    with engine:
        engine.backward(case.losses(compiled, inputs or case.inputs))
    return engine


@pytest.mark.slow
def test_compiled_gpt2_gives_the_same_sums() -> None:
    torch.manual_seed(0)
    torch._dynamo.utils.counters.clear()
    case = gpt2(n_layer=1).to(torch.float64)
    eager = ClippingEngine(case.model, clip_norm=0.5)
    wanted = run(eager, case.losses, case.inputs)
    engine = compiled_run(case, "aot_eager")
    torch.testing.assert_close(engine.sample_norms, eager.sample_norms, rtol=1e-10, atol=0)
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)
    assert not torch._dynamo.utils.counters["graph_break"]


def assert_every_step_agrees(
    case: Case, backend: str, rtol: float, **options: object
) -> ClippingEngine:
    """Three steps, each with the same sums."""
    torch._dynamo.reset()
    compiled = torch.compile(case.model, fullgraph=True, backend=backend)
    eager = ClippingEngine(case.model, clip_norm=0.5, **options)  # type: ignore[arg-type]
    wanted = run(eager, case.losses, case.inputs)
    engine = ClippingEngine(case.model, clip_norm=0.5, **options)  # type: ignore[arg-type]
    for _ in range(3):
        engine.reset()
        with engine:
            engine.backward(case.losses(compiled, case.inputs))
        torch.testing.assert_close(engine.sample_norms, eager.sample_norms, rtol=rtol, atol=0)
        assert_same_sums(engine.clipped_sum(), wanted, rtol)
    return engine


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
# OPT draws a number for every layer and asks for it; see `test_folded` for Mixtral.
@pytest.mark.parametrize("name", sorted({*CASES} - {"opt", "mixtral"}))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_model_compiles(name: str, backend: str) -> None:
    torch.manual_seed(1)
    # Llama's norms and rotary embeddings round to float32 in the middle of a float64 model, and
    # inductor evaluates them in another order.
    rtol = 1e-6 if backend == "inductor" and name.startswith("llama") else 1e-9
    assert_every_step_agrees(CASES[name]().to(torch.float64), backend, rtol)


class Small(nn.Module):
    """Every rule in one model, with a layer called twice on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.rms = nn.RMSNorm(4)
        self.conv = nn.Conv1d(5, 5, 1)
        self.group = nn.GroupNorm(1, 5)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.norm(x)) + self.linear(self.norm(x))
        x = self.group(self.conv(self.rms(x)))
        return self.attention(x, x, x, need_weights=False)[0]


def small() -> Case:
    inputs = {"x": torch.randn(3, 5, 4)}
    return Case(
        model=Small(), inputs=inputs, losses=lambda m, i: m(i["x"]).square().flatten(1).sum(1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["flat", "per-layer"])
def test_every_rule_compiles(clip: str) -> None:
    torch.manual_seed(2)
    assert_every_step_agrees(small().to(torch.float64), "aot_eager", 1e-9, clip=clip)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_rule_survives_inductor_reusing_its_buffers() -> None:
    torch.manual_seed(3)
    assert_every_step_agrees(small().to(torch.float64), "inductor", 1e-9)


@pytest.mark.slow
def test_batches_of_varying_size_and_a_plain_call_in_between() -> None:
    torch.manual_seed(4)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    case = Case(model=model, inputs=small().inputs, losses=small().losses).to(torch.float64)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    compiled_engine, eager_engine = ClippingEngine(case.model), ClippingEngine(case.model)
    for size in (3, 5, 4):
        inputs = {"x": torch.randn(size, 5, 4, dtype=torch.float64)}
        with torch.no_grad():
            compiled(inputs["x"])
        with compiled_engine:
            compiled_engine.backward(case.losses(compiled, inputs))
        run(eager_engine, case.losses, inputs)
    assert_same_sums(compiled_engine.clipped_sum(), eager_engine.clipped_sum(), 1e-9)
    plain = compiled(case.inputs["x"]).sum()
    plain.backward()
    assert model[0].weight.grad is not None


def compiled_pair() -> tuple[ClippingEngine, Case, nn.Module]:
    """An engine, its case, and the compiled model, after three batches."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    case = Case(model=model, inputs=small().inputs, losses=small().losses).to(torch.float64)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    engine = ClippingEngine(case.model)
    for _ in range(3):
        with engine:
            engine.backward(case.losses(compiled, case.inputs))
    engine.reset()
    return engine, case, compiled


@pytest.mark.slow
def test_batches_of_one_shape_compile_nothing_more() -> None:
    engine, case, compiled = compiled_pair()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            inputs = {"x": torch.randn_like(case.inputs["x"])}
            wanted = run(ClippingEngine(case.model), case.losses, inputs)
            engine.reset()
            with engine:
                engine.backward(case.losses(compiled, inputs))
            assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


def resized(inputs: Inputs, size: int) -> Inputs:
    """The samples of a batch over and over, until there are so many."""
    places = torch.arange(size) % len(next(iter(inputs.values())))
    return {name: tensor[places] for name, tensor in inputs.items()}


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "llama-tied", "vit"])
def test_a_model_is_compiled_for_two_sizes_and_then_for_all(name: str) -> None:
    torch.manual_seed(6)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = CASES[name]().to(torch.float64)
    compiled = torch.compile(case.model, backend="aot_eager")
    engine, eager = ClippingEngine(case.model), ClippingEngine(case.model)
    graphs = []
    for size in (3, 5, 4, 7, 6):
        inputs = resized(case.inputs, size)
        eager.reset()
        engine.reset()
        wanted = run(eager, case.losses, inputs)
        with engine:
            engine.backward(case.losses(compiled, inputs))
        assert_same_sums(engine.clipped_sum(), wanted, 1e-9)
        graphs.append(num_graphs())
    assert graphs[0] < graphs[1] == graphs[-1]


class Block(nn.Module):
    """A user's own class: the compiler passes over `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


@pytest.mark.slow
def test_checks_compile_nothing_where_blocks_are_compiled() -> None:
    torch.manual_seed(7)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks = [Block(), Block()]
    case = Case(model=nn.Sequential(*blocks), inputs=small().inputs, losses=small().losses)
    case = case.to(torch.float64)
    for block in blocks:
        block.compile(backend="aot_eager")
    engine, eager = ClippingEngine(case.model), ClippingEngine(case.model)
    graphs = []
    for size in (3, 3, 6, 7, 8):
        inputs = resized(case.inputs, size)
        with torch.compiler.set_stance("force_eager"):
            wanted = run(eager, case.losses, inputs)
        eager.reset()
        engine.reset()
        with engine:
            engine.backward(case.losses(case.model, inputs))
        assert_same_sums(engine.clipped_sum(), wanted, 1e-9)
        graphs.append(num_graphs())
    # The first batch is watched without a compiler, the others are compiled block by block.
    assert graphs == [0, 2, 4, 4, 4]


class ThreeReaders(nn.Module):
    """Query, key and value of one input; the value layer is called once more on another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        mixed = self.query(x) * self.key(x) + self.value(x)
        return mixed + self.value(mixed)


@pytest.mark.slow
def test_several_layers_may_read_one_input() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = ThreeReaders().double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    engine = ClippingEngine(model, clip_norm=0.5)
    for _ in range(4):
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        engine.reset()
        with engine:
            engine.backward(compiled(x).square().sum((1, 2)))
        eager = ClippingEngine(model, clip_norm=0.5)
        wanted = run(eager, lambda m, i: m(i["x"]).square().sum((1, 2)), {"x": x})
        torch.testing.assert_close(engine.sample_norms, eager.sample_norms, rtol=1e-10, atol=0)
        assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


class FourNorms(nn.Module):
    """Norms of two widths, one of them called twice, between layers without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.gain = nn.LayerNorm(4), nn.LayerNorm(4), nn.RMSNorm(4)
        self.wide = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).sin() + self.one(x * x)).tanh()
        return self.wide(torch.cat([self.gain(x), x.exp()], -1)).square()


@pytest.mark.slow
def test_norms_of_several_widths_compile() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = FourNorms().double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    engine = ClippingEngine(model, clip_norm=0.5)
    for _ in range(4):
        x = torch.randn(3, 5, 4, dtype=torch.float64)
        engine.reset()
        with engine:
            engine.backward(compiled(x).sum((1, 2)))
        eager = ClippingEngine(model, clip_norm=0.5)
        wanted = run(eager, lambda m, i: m(i["x"]).sum((1, 2)), {"x": x})
        torch.testing.assert_close(engine.sample_norms, eager.sample_norms, rtol=1e-10, atol=0)
        assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


@pytest.mark.slow
def test_micro_batches_of_any_shape_add_up() -> None:
    engine, case, compiled = compiled_pair()
    eager = ClippingEngine(case.model)
    for size in (3, 2, 3, 5, 5, 3):
        inputs = {"x": torch.randn(size, 5, 4, dtype=torch.float64)}
        with engine:
            engine.backward(case.losses(compiled, inputs))
        run(eager, case.losses, inputs)
    assert_same_sums(engine.clipped_sum(), eager.clipped_sum(), 1e-9)
    torch.testing.assert_close(engine.sample_norms, eager.sample_norms, rtol=1e-9, atol=0)


class InPieces(nn.Module):
    """Layers that are compiled one by one, as where a model's own code cannot be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    @torch.compiler.disable(recursive=False)
    def one_by_one(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.one_by_one(x)


def squares(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


@pytest.mark.slow
def test_a_model_may_be_compiled_in_pieces() -> None:
    torch._dynamo.reset()
    model, inputs = InPieces().double(), {"x": torch.randn(3, 5, 4, dtype=torch.float64)}
    wanted = run(ClippingEngine(model), squares, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    engine = ClippingEngine(model)
    for _ in range(4):
        engine.reset()
        with engine:
            engine.backward(squares(compiled, inputs))
        assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


def test_one_compiled_backward_over_two_forwards_is_refused() -> None:
    torch._dynamo.reset()
    case = Case(model=nn.Linear(4, 4), inputs=small().inputs, losses=small().losses)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    with ClippingEngine(case.model), pytest.raises(UnsupportedModuleError, match="in turn"):
        (case.losses(compiled, case.inputs) + case.losses(compiled, case.inputs)).sum().backward()


@pytest.mark.slow
def test_two_forwards_of_a_layer_called_twice_are_never_added_up() -> None:
    case = small().to(torch.float64)
    engine = assert_every_step_agrees(case, "aot_eager", 1e-9)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    with engine, pytest.raises(UnsupportedModuleError, match="in turn"):
        (case.losses(compiled, case.inputs) + case.losses(compiled, case.inputs)).sum().backward()


def test_two_forwards_are_never_added_up() -> None:
    engine, case, compiled = compiled_pair()
    with engine, pytest.raises(UnsupportedModuleError, match="in turn"):
        (case.losses(compiled, case.inputs) + case.losses(compiled, case.inputs)).sum().backward()
    with engine:
        case.losses(compiled, case.inputs)
        engine.backward(case.losses(compiled, case.inputs))
    wanted = run(ClippingEngine(case.model), case.losses, case.inputs)
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


@pytest.mark.slow
def test_nothing_outlives_the_engine() -> None:
    engine, _, _ = compiled_pair()
    recorder = weakref.ref(engine._recorder)
    torch._dynamo.reset()
    del engine
    gc.collect()
    assert recorder() is None


class Token(nn.Module):
    """A class token, of a class that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_bare_parameters_compile() -> None:
    torch.manual_seed(5)
    torch._dynamo.reset()
    case = Case(model=Token(), inputs=small().inputs, losses=small().losses).to(torch.float64)
    wanted = run(ClippingEngine(case.model), case.losses, case.inputs)
    engine = ClippingEngine(case.model)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    with engine:
        engine.backward(case.losses(compiled, case.inputs))
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


class Reader(nn.Module):
    """A table and a head over the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.words(ids)).tanh())


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.slow),
    ],
)
def test_a_head_with_rows_of_zeros_gives_the_same_sums(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the half-precision copy of a vocabulary's head is padded."""
    torch.manual_seed(0)
    model, ids, labels = Reader(), torch.randint(40, (3, 5)), torch.randint(40, (3, 5))

    def losses(called: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = called(ids)
        return F.cross_entropy(logits.float().mT, labels, reduction="none").sum(1)

    def step(called: nn.Module) -> ClippingEngine:
        engine = ClippingEngine(model, clip_norm=0.5)
        with engine:
            engine.backward(losses(called))
        return engine

    expected = step(model)
    widths: list[int] = []

    def padded(parameter: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
        widths.append(parameter.shape[0] + rows)
        return F.pad(parameter.to(dtype), (*(0, 0) * (parameter.dim() - 1), 0, rows))

    monkeypatch.setattr(linear, "_MIN_PADDED_ROWS", 32)
    monkeypatch.setattr(linear, "lowered", padded)
    torch._dynamo.reset()
    found = step(torch.compile(model, fullgraph=True, backend=backend))
    assert set(widths) == {16, 128}
    torch.testing.assert_close(found.sample_norms, expected.sample_norms, rtol=1e-2, atol=0)
    assert_same_sums(found.clipped_sum(), expected.clipped_sum(), 2e-2)


class Mixing(nn.Module):
    """Words and positions; `fault` says how the samples of a batch are mixed up."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 8), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 3)
        self.fault = fault

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        if self.fault == "flipped":
            words = words.flip(0)
        positions = self.positions(torch.arange(ids.shape[1])[None])
        mixed = words + (positions[0] if self.fault == "first row" else positions)
        if self.fault == "scaled":
            mixed = mixed / words.abs().max()
        return self.head(mixed).sum(1)


@pytest.mark.parametrize("fault", ["flipped", "first row", "scaled"])
def test_samples_mixed_in_a_compiled_model_are_found_before_their_sums_are_used(
    fault: str,
) -> None:
    torch.manual_seed(0)
    model, ids = Mixing(fault), torch.randint(9, (4, 6))
    engine = ClippingEngine(model)
    torch._dynamo.reset()
    # Attribution is compared with plain autograd where the compiler compiles backwards too.
    backend = "aot_eager" if fault == "first row" else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in ("found", "found again"):
        with engine, pytest.raises(UnsupportedModuleError):
            engine.backward(compiled(ids).square().sum(1))
        assert not any(total.any() for total in engine.clipped_sum().values())
        engine.reset()


def test_the_check_of_a_compiled_model_runs_under_the_autocast_of_its_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = ClippingEngine(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(3, 5).bfloat16()
    with engine:
        with torch.autocast("cpu", torch.bfloat16):
            out = compiled(x)
        engine.backward(out.float().square().sum(1))
    assert bool((engine.sample_norms > 0).all())
    assert engine.num_checked == 1


def test_a_compiled_model_is_checked_once_and_compiled_no_more_often() -> None:
    torch.manual_seed(0)
    model, ids = Mixing(""), torch.randint(9, (4, 6))
    engine = ClippingEngine(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with mock.patch.object(
        engine._checks.axis, "run", side_effect=engine._checks.axis.run
    ) as checked:
        for _ in range(4):
            with engine:
                engine.backward(compiled(ids).square().sum(1))
            engine.reset()
    assert checked.call_count == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
