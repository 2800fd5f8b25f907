"""`torch.compile(fullgraph=True)` of the model: no graph break, the same sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipping.compare import assert_same_sums, run
from clipping.tiny_models import CASES, Case, Inputs, gpt2
from shuffled_dpsgd.clipping import ClippingEngine
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


def test_compiled_gpt2_gives_the_same_sums() -> None:
    torch.manual_seed(0)
    case = gpt2(n_layer=1).to(torch.float64)
    eager = ClippingEngine(case.model, clip_norm=0.5)
    wanted = run(eager, case.losses, case.inputs)
    engine = compiled_run(case, "aot_eager")
    torch.testing.assert_close(engine.sample_norms, eager.sample_norms, rtol=1e-10, atol=0)
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_model_compiles(name: str, backend: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]().to(torch.float64)
    wanted = run(ClippingEngine(case.model, clip_norm=0.5), case.losses, case.inputs)
    engine = compiled_run(case, backend)
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


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


@pytest.mark.parametrize("clip", ["flat", "per-layer"])
def test_every_rule_compiles(clip: str) -> None:
    torch.manual_seed(2)
    case = small().to(torch.float64)
    wanted = run(ClippingEngine(case.model, clip_norm=0.5, clip=clip), case.losses, case.inputs)
    engine = compiled_run(case, "aot_eager", clip=clip)
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_rule_survives_inductor_reusing_its_buffers() -> None:
    torch.manual_seed(3)
    case = small().to(torch.float64)
    wanted = run(ClippingEngine(case.model, clip_norm=0.5), case.losses, case.inputs)
    assert_same_sums(compiled_run(case, "inductor").clipped_sum(), wanted, 1e-9)


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


def test_one_compiled_backward_over_two_forwards_is_refused() -> None:
    torch._dynamo.reset()
    case = Case(model=nn.Linear(4, 4), inputs=small().inputs, losses=small().losses)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    with ClippingEngine(case.model), pytest.raises(UnsupportedModuleError, match="in turn"):
        (case.losses(compiled, case.inputs) + case.losses(compiled, case.inputs)).sum().backward()


class Token(nn.Module):
    """A class token, which only a check in eager mode can tell to be broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_bare_parameters_compile_once_an_eager_batch_has_checked_them() -> None:
    torch.manual_seed(5)
    torch._dynamo.reset()
    case = Case(model=Token(), inputs=small().inputs, losses=small().losses).to(torch.float64)
    engine = ClippingEngine(case.model)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    # The compiler reports our refusal in its own words, with the line that raises it.
    with engine, pytest.raises(torch._dynamo.exc.Unsupported, match="UnsupportedModuleError"):
        case.losses(compiled, case.inputs)
    torch._dynamo.reset()
    wanted = dict(run(engine, case.losses, case.inputs))
    engine.reset()
    with engine:
        engine.backward(case.losses(compiled, case.inputs))
    assert_same_sums(engine.clipped_sum(), wanted, 1e-9)
