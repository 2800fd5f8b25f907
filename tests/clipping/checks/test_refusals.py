"""What the engine cannot do exactly ends in an error that names the module, never in a number."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from clipping.compare import assert_exact, assert_same_sums, oracle, run
from clipping.tiny_models import Inputs, gpt2
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    out = model(inputs["x"])
    return (out if isinstance(out, Tensor) else out[0]).square().flatten(1).sum(1)


def batch(*shape: int) -> Inputs:
    return {"x": torch.randn(*shape).double()}


class Pair(nn.Module):
    """One module inside another, so that refusals have a path to name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.first(x))
        return out if isinstance(out, Tensor) else out[0]


class Holding(nn.Module):
    """Holds a bare parameter beside a child, and uses it as `use` says."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(*shape))
        self.child = nn.Linear(4, 4)
        self.use = use

    def forward(self, x: Tensor) -> object:
        return self.use(self.child(x), self.own)


def _branch(x: Tensor, own: Tensor) -> Tensor:
    return x * own if torch.is_grad_enabled() and x.sum() > 0 else x + own


@pytest.mark.parametrize(
    ("inner", "shape", "names"),
    [
        (lambda: Holding((4,), _branch), (3, 5, 4), "inner: .*vmap.*freeze own"),
        (
            lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
            (3, 5, 4),
            "inner: .*vmap",
        ),
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), (3, 4), "inner: .*vmap"),
        (
            lambda: Holding((1, 1, 4), lambda x, p: torch.cat([p.repeat(len(x), 1, 1), x], 1)),
            (3, 5, 4),
            "inner: expected own only broadcast.*use expand",
        ),
    ],
    ids=["branching", "running statistics", "power iteration", "repeated token"],
)
def test_modules_that_cannot_be_run_one_sample_at_a_time(
    inner: Callable[[], nn.Module], shape: tuple[int, ...], names: str
) -> None:
    torch.manual_seed(0)
    engine = ClippingEngine(Pair(inner()).double())
    with pytest.raises(UnsupportedModuleError, match=names):
        run(engine, losses, batch(*shape))


def test_the_generic_rule_inside_a_checkpoint_saves_the_same_every_time() -> None:
    class Checkpointed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed(Holding((4,), torch.mul)).double()
    assert_exact(model, losses, batch(3, 5, 4))


def test_an_error_of_the_module_itself_is_raised_as_it_is() -> None:
    engine = ClippingEngine(Pair(Holding((3,), torch.mul)).double())
    with pytest.raises(RuntimeError, match="must match the size"):
        run(engine, losses, batch(3, 5, 4))


def test_outputs_that_are_no_tensors_pass_through_the_generic_rule() -> None:
    def with_others(x: Tensor, own: Tensor) -> object:
        return x * own, None, 3

    assert_exact(Pair(Holding((4,), with_others)).double(), losses, batch(3, 5, 4))


def test_a_trainable_attention_mask_under_the_generic_rule() -> None:
    def attend(x: Tensor, own: Tensor) -> Tensor:
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=own.expand(1, 1, 5, 5)).squeeze(1)

    assert_exact(Pair(Holding((5, 5), attend)).double(), losses, batch(3, 5, 4))


def test_the_generic_rule_takes_an_empty_batch() -> None:
    model = Pair(Holding((5, 5, 1), F.conv1d)).double()
    engine = ClippingEngine(model)
    with engine:
        model(torch.randn(0, 5, 4).double()).sum().backward()
    assert all(not value.any() for value in engine.clipped_sum().values())
    assert engine.sample_norms.numel() == 0


def test_the_generic_rule_under_autocast_allows_for_its_rounding() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, 4)
            self.token = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.patches(x).flatten(2).mT.float() + self.token

    torch.manual_seed(0)
    engine = ClippingEngine(Patches())
    with torch.autocast("cpu", torch.bfloat16):
        run(engine, losses, {"x": torch.randn(3, 3, 16, 16)})
    assert engine.sample_norms.shape == (3,)


def test_attention_with_a_wrapped_projection_is_not_taken_for_plain_attention() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    register_parametrization(attention.out_proj, "weight", nn.Tanh())

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    assert_exact(Attending().double(), losses, batch(3, 5, 4))


@pytest.mark.parametrize(
    ("parameter", "names"),
    [
        (lambda: nn.LazyLinear(3), "weight: .*lazy"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "weight: .*real"),
        (lambda: nn.Linear(3, 3).requires_grad_(False), "something to train"),
    ],
    ids=["lazy", "complex", "all frozen"],
)
def test_unfit_parameters_are_refused_at_once(
    parameter: Callable[[], nn.Module], names: str
) -> None:
    with pytest.raises(UnsupportedModuleError, match=names):
        ClippingEngine(parameter())


@pytest.mark.parametrize("option", ["clip", "strategy", "loss_reduction"])
def test_unknown_options_are_answered_with_the_known_ones(option: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{option}: expected one of \('\w+', [^<]*\)"):
        ClippingEngine(nn.Linear(2, 2), **{option: "other"})


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), "1", None])
def test_a_clip_norm_that_is_no_positive_number_is_refused(clip_norm: object) -> None:
    with pytest.raises(InvalidArgumentError, match="clip_norm: expected a positive number"):
        ClippingEngine(nn.Linear(2, 2), clip_norm=clip_norm)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda m: m.append(nn.Linear(4, 4)), "2.weight: .*another parameter"),
        (lambda m: m.__setitem__(0, nn.Linear(4, 4)), "0.weight: .*another parameter"),
        (lambda m: m.__delitem__(1), "1: .*another module, or none"),
        (lambda m: setattr(m[1], "weight", m[0].weight), "1.weight: .*another module, or none"),
    ],
    ids=["added", "exchanged", "removed", "tied"],
)
def test_a_model_changed_after_construction_is_refused(
    change: Callable[[nn.Sequential], object], names: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = ClippingEngine(model)
    change(model)
    with pytest.raises(UnsupportedModuleError, match=f"{names}.*build a new engine"), engine:
        pass


def test_weights_loaded_in_the_place_of_tied_ones_are_refused() -> None:
    case = gpt2()
    engine = ClippingEngine(case.model)
    case.model.load_state_dict(copy.deepcopy(case.model.state_dict()), assign=True)
    with pytest.raises(UnsupportedModuleError, match="build a new engine"):
        run(engine, case.losses, case.inputs)


def test_two_engines_on_one_model_take_turns() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    one, other = ClippingEngine(model), ClippingEngine(model)
    with one, pytest.raises(UnsupportedModuleError, match="other engine"), other:
        pass
    for engine in (one, other):
        run(engine, losses, {"x": torch.randn(3, 4)})
        assert engine.sample_norms.shape == (3,)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_model_in_use_is_not_copied_with_its_engine(
    duplicate: Callable[[nn.Module], object],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine = ClippingEngine(model)
    with engine:
        with pytest.raises(UnsupportedModuleError, match=r"0: .*copy model.state_dict\(\)"):
            duplicate(model)
        copy.deepcopy(model.state_dict())
    duplicate(model)
    assert "forward" not in copy.deepcopy(model)[0].__dict__


def test_losses_without_a_gradient_are_refused() -> None:
    model = nn.Linear(4, 4)
    engine = ClippingEngine(model)
    with engine, pytest.raises(InvalidArgumentError, match=r"losses: .*trainable"):
        engine.backward(model(torch.randn(3, 4)).detach().sum(1))


@pytest.mark.parametrize("loss_scale", [0.0, -1.0, float("inf")])
def test_a_loss_scale_that_cannot_be_divided_out_is_refused(loss_scale: float) -> None:
    model = nn.Linear(4, 4)
    engine = ClippingEngine(model)
    with engine, pytest.raises(InvalidArgumentError, match="loss_scale"):
        engine.backward(losses(model, {"x": torch.randn(3, 4)}), loss_scale=loss_scale)


def test_losses_of_an_earlier_forward_are_refused() -> None:
    """They would be scaled as the latest forward's are."""
    model = nn.Linear(4, 4)
    engine = ClippingEngine(model, loss_reduction="mean")
    with engine:
        earlier = losses(model, {"x": torch.randn(3, 4)})
        losses(model, {"x": torch.randn(3, 4)})
        with pytest.raises(InvalidArgumentError, match="losses of the latest forward"):
            engine.backward(earlier)


class Failing(torch.autograd.Function):
    """Passes values on, and fails in the backward as long as it is told to."""

    fails = True

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        if Failing.fails:
            raise MemoryError("out of memory")
        return g


@pytest.mark.parametrize(
    ("clip", "strategy"), [("per-layer", "bookkeeping"), ("flat", "ghost"), ("flat", "bookkeeping")]
)
def test_a_backward_that_failed_half_way_is_not_counted_twice(clip: str, strategy: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Failing.apply(self.first(x)))

    model, inputs = Model(), {"x": torch.randn(3, 4)}
    engine = ClippingEngine(model, clip=clip, strategy=strategy)
    Failing.fails = False
    wanted = {name: value.clone() for name, value in run(engine, losses, inputs).items()}
    engine.reset()
    Failing.fails = True
    with pytest.raises(MemoryError):
        run(engine, losses, inputs)
    Failing.fails = False
    for name, value in run(engine, losses, inputs).items():
        torch.testing.assert_close(value, wanted[name])


def test_scripted_modules_are_refused_by_name() -> None:
    with warnings.catch_warnings(action="ignore"):
        inner = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    with pytest.raises(UnsupportedModuleError, match=r"1: .*scripted module"):
        ClippingEngine(nn.Sequential(nn.Linear(4, 8), inner))


def test_adaptive_softmax_is_refused_by_name() -> None:
    model = nn.ModuleDict({"head": nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])})
    with pytest.raises(UnsupportedModuleError, match=r"head: .*AdaptiveLogSoftmaxWithLoss"):
        ClippingEngine(model)


def test_as_many_tokens_as_samples_do_not_stop_an_encoder_decoder() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    config = BartConfig(vocab_size=50, d_model=16, max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    model = BartForConditionalGeneration(config).double().eval()

    def losses(m: nn.Module, inputs: Inputs) -> Tensor:
        logits = m(**inputs, use_cache=False).logits
        return logits.square().flatten(1).sum(1)

    engine = ClippingEngine(model)
    for size, tokens in ((3, 7), (7, 7), (4, 4)):
        ids = torch.randint(3, 50, (2, size, tokens))
        inputs = {"input_ids": ids[0], "decoder_input_ids": ids[1]}
        engine.reset()
        got = run(engine, losses, inputs)
        assert_same_sums(got, oracle(model, losses, inputs, 1.0).clipped_sum, 1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole", [True, False])
def test_bare_parameters_are_compiled_as_they_are(whole: bool) -> None:
    torch._dynamo.reset()
    model = Holding((1, 1, 4), lambda x, own: x + own)
    compiled = torch.compile(model, fullgraph=whole, backend="eager")
    x = torch.randn(3, 5, 4)
    engine = ClippingEngine(model)
    with engine:
        engine.backward(model(x).square().sum((1, 2)))
        wanted = engine.clipped_sum()
        engine.reset()
        engine.backward(compiled(x).square().sum((1, 2)))
    for name, total in engine.clipped_sum().items():
        torch.testing.assert_close(total, wanted[name])


def test_a_bare_parameter_that_is_not_broadcast_is_refused_by_the_referee() -> None:
    def first(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return x * own[:1]

    engine = ClippingEngine(Pair(Holding((1, 1, 4), first)).double())
    with pytest.raises(UnsupportedModuleError, match=r"inner.*plain autograd finds"):
        run(engine, losses, batch(3, 5, 4))
