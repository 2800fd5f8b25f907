"""Whatever cannot be exact is refused by name; nothing stays behind; nothing leaks."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from clipping.compare import assert_exact, assert_same_sums, oracle, run
from clipping.tiny_models import Inputs, gpt2, token_ids
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


class Scale(nn.Module):
    """A bare parameter without a leading axis: the generic rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return torch.tanh(x * self.scale + (0 if shift is None else shift))


class Token(nn.Module):
    """A class token with a leading axis of length one, used properly or not."""

    def __init__(self, proper: bool) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.inner = nn.Linear(4, 4)
        self.proper = proper

    def forward(self, x: Tensor) -> Tensor:
        token = self.token if self.proper else self.token.sum(0, keepdim=True)
        return self.inner(torch.cat([token.expand(len(x), -1, -1), x], 1))


class TestGenericRule:
    def test_bare_parameter(self) -> None:
        x = torch.randn(3, 5, 4, dtype=torch.float64)
        assert_exact(nn.Sequential(Scale(), nn.Linear(4, 2)).double(), losses, {"x": x})

    def test_bare_parameter_of_the_root_itself(self) -> None:
        assert_exact(Scale().double(), losses, {"x": torch.randn(3, 4, dtype=torch.float64)})

    def test_parameters_in_a_list(self) -> None:
        class Listed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gains = nn.ParameterList([torch.randn(4), torch.randn(4)])
                self.inner = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.gains[0] * self.inner(x) + self.gains[1]

        x = torch.randn(3, 4, dtype=torch.float64)
        assert_exact(nn.Sequential(Listed()).double(), losses, {"x": x})

    def test_parametrised_weight(self) -> None:
        class Positive(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight.exp()

        layer = nn.Linear(4, 3, bias=False)
        nn.utils.parametrize.register_parametrization(layer, "weight", Positive())
        x = torch.randn(3, 5, 4, dtype=torch.float64)
        assert_exact(nn.Sequential(layer).double(), losses, {"x": x})

    def test_overridden_forward_is_not_taken_for_its_base_class(self) -> None:
        class Doubled(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * F.linear(x, self.weight.square(), self.bias)

        x = torch.randn(3, 4, dtype=torch.float64)
        engine = assert_exact(nn.Sequential(Doubled(4, 3)).double(), losses, {"x": x})
        assert engine.plan()[0].kind == "generic"

    def test_an_input_of_the_batch_length_by_accident_is_known_for_one(self) -> None:
        class Shifted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Scale()
                self.shift = nn.Buffer(torch.randn(3, 4))

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x, self.shift)

        assert_exact(Shifted().double(), losses, {"x": torch.randn(3, 3, 4).double()})

    def test_token_broadcast_over_the_batch_leaves_children_their_rules(self) -> None:
        x = torch.randn(3, 5, 4, dtype=torch.float64)
        engine = assert_exact(nn.Sequential(Token(True)).double(), losses, {"x": x})
        assert [row.kind for row in engine.plan()] == ["broadcast", "linear"]

    def test_token_used_otherwise_is_refused(self) -> None:
        engine = ClippingEngine(nn.Sequential(Token(False)))
        with pytest.raises(UnsupportedModuleError, match="plain autograd finds"):
            run(engine, losses, {"x": torch.randn(3, 5, 4)})


class TestRefusals:
    def test_t5_relative_position_bias_is_refused_by_name(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            vocab_size=40,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
        with pytest.raises(UnsupportedModuleError, match="relative_attention_bias"):
            ClippingEngine(model)

    def test_t5_is_exact_once_that_table_is_frozen(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        config = T5Config(
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            vocab_size=40,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
        model = T5ForConditionalGeneration(config).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("relative_attention_bias" not in name)

        def translate(model: nn.Module, inputs: Inputs) -> Tensor:
            logits = model(**inputs).logits
            return F.cross_entropy(logits.mT, inputs["labels"], reduction="none").sum(1)

        inputs = token_ids() | {"labels": torch.randint(1, 40, (4, 5))}
        assert_exact(model, translate, inputs)

    def test_batch_norm(self) -> None:
        model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
        with pytest.raises(UnsupportedModuleError, match=r"1: .*GroupNorm"):
            ClippingEngine(model)
        frozen = ClippingEngine(model.eval())
        model.train()
        with pytest.raises(UnsupportedModuleError, match="BatchNorm1d"), frozen:
            pass

    def test_embedding_that_renormalises(self) -> None:
        with pytest.raises(UnsupportedModuleError, match="max_norm"):
            ClippingEngine(nn.Embedding(3, 2, max_norm=1.0))

    def test_weight_used_outside_its_module(self) -> None:
        class Stray(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(5, 4)

            def forward(self, ids: Tensor) -> Tensor:
                return F.linear(self.table(ids), self.table.weight)

        model = Stray()
        with pytest.raises(UnsupportedModuleError, match=r"table\.weight"):
            run(ClippingEngine(model), losses, {"x": torch.randint(5, (3, 2))})
        assert model.table.weight.grad is None

    def test_second_backward_through_one_forward(self) -> None:
        model = nn.Linear(3, 2)
        with ClippingEngine(model):
            out = losses(model, {"x": torch.randn(2, 3)})
            out.sum().backward(retain_graph=True)
            with pytest.raises(UnsupportedModuleError, match="one backward"):
                out.sum().backward()

    def test_one_backward_over_two_forwards(self) -> None:
        model = nn.Linear(3, 2)
        x = {"x": torch.randn(2, 3)}
        with ClippingEngine(model), pytest.raises(UnsupportedModuleError, match="one forward"):
            (losses(model, x).sum() + losses(model, x).sum()).backward()

    def test_higher_derivatives(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        with ClippingEngine(model), pytest.raises(UnsupportedModuleError, match="first-order"):
            losses(model, {"x": torch.randn(2, 3)}).sum().backward(create_graph=True)

    def test_a_part_of_the_model_called_alone(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        with ClippingEngine(model), pytest.raises(UnsupportedModuleError, match="own forward"):
            model[0](torch.randn(2, 3))

    def test_a_parameter_made_trainable_behind_the_engine(self) -> None:
        model = nn.Linear(3, 2)
        model.bias.requires_grad_(False)
        engine = ClippingEngine(model)
        model.bias.requires_grad_(True)
        with pytest.raises(UnsupportedModuleError, match="bias"), engine:
            pass

    def test_forgotten_context(self) -> None:
        model = nn.Linear(3, 2)
        engine = ClippingEngine(model)
        losses(model, {"x": torch.randn(2, 3)}).sum().backward()
        with pytest.raises(InvalidArgumentError, match="with engine"):
            engine.clipped_sum()

    def test_losses_of_another_shape(self) -> None:
        model = nn.Linear(3, 2)
        engine = ClippingEngine(model)
        with engine, pytest.raises(InvalidArgumentError, match="one loss per sample"):
            engine.backward(model(torch.randn(2, 3)))

    def test_two_engines_at_once(self) -> None:
        model = nn.Linear(3, 2)
        with ClippingEngine(model), pytest.raises(UnsupportedModuleError, match="replaced"):
            ClippingEngine(model)

    def test_a_module_replaced_inside_the_context(self) -> None:
        """Its gradients are in no sum, so the sums are not those of the model that was run."""
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        engine = ClippingEngine(model)
        with engine:
            engine.backward(model(torch.randn(4, 3)).sum(dim=1))
            model[1] = nn.Linear(3, 2)
            for call in (engine.clipped_sum, lambda: model(torch.randn(4, 3))):
                with pytest.raises(UnsupportedModuleError, match=r"^1\.weight: expected the mod"):
                    call()


class TestNothingStaysBehind:
    def test_model_is_untouched_afterwards(self) -> None:
        case = gpt2()
        before = {path: dict(vars(m)) for path, m in case.model.named_modules()}
        keys = list(case.model.state_dict())
        run(ClippingEngine(case.model), case.losses, case.inputs)
        for path, module in case.model.named_modules():
            assert vars(module).keys() == before[path].keys()
            assert "forward" not in vars(module)
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert list(case.model.state_dict()) == keys
        assert all(p.grad is None for p in case.model.parameters())

    def test_model_is_untouched_after_an_error(self) -> None:
        model = nn.Linear(3, 2)
        with pytest.raises(RuntimeError), ClippingEngine(model):
            model(torch.randn(2, 4))
        assert "forward" not in vars(model)

    def test_an_interrupted_backward_is_forgotten(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
        x = torch.randn(2, 3, dtype=torch.float64)
        engine = ClippingEngine(model)

        def stumble(grad: Tensor) -> Tensor:
            raise KeyError("interrupted")

        with engine:
            hidden = model(x)
            hidden.register_hook(stumble)
            with pytest.raises(KeyError):
                hidden.sum().backward()
            losses(model, {"x": x}).sum().backward()
        wanted = oracle(model, losses, {"x": x}, 1.0)
        assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)

    def test_reset_leaves_tensors_handed_out_alone(self) -> None:
        model = nn.Linear(3, 2)
        engine = ClippingEngine(model)
        x = {"x": torch.randn(2, 3)}
        handed_out = run(engine, losses, x)
        kept = {name: value.clone() for name, value in handed_out.items()}
        engine.reset()
        assert engine.sample_norms.numel() == 0
        run(engine, losses, {"x": torch.randn(2, 3)})
        assert all(torch.equal(handed_out[name], kept[name]) for name in kept)


def test_no_activation_outlives_the_backward() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4)]
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(x)
                kept.append(weakref.ref(x))
                x = layer(x)
            return x

    model = Watched()
    engine = ClippingEngine(model)
    with engine:
        model(torch.randn(2, 4))
        kept.clear()
        loss = losses(model, {"x": torch.randn(2, 4)})
        engine.backward(loss)
    gc.collect()
    # The loss is still alive, and with it the graph; what the layers saw must not be.
    assert loss.grad_fn is not None
    assert len(kept) >= 4
    assert all(reference() is None for reference in kept)


def test_in_place_operation_after_a_layer_does_not_disturb_its_gradient() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(torch.tanh(x * 1.0))
            hidden += 1.0
            hidden = torch.relu_(hidden)
            out = self.second(hidden)
            out *= 2.0
            return out

    for requires_grad in (True, False):
        x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=requires_grad)
        assert_exact(InPlace().double(), losses, {"x": x})


class Attention(nn.MultiheadAttention):
    """Self-attention as a layer with one input and one output."""

    def __init__(self) -> None:
        super().__init__(4, 2, batch_first=True)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), Conv1D(4, 4), Attention()], ids=["linear", "conv1d-hf", "attention"]
)
def test_in_place_activations_after_a_first_layer_and_inside_checkpoints(layer: nn.Module) -> None:
    """There the layer is a function of its own, whose output must be no view."""
    inner = nn.Sequential(layer, nn.ReLU(inplace=True), copy.deepcopy(layer), nn.ReLU(inplace=True))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    x = torch.randn(3, 5, 4, dtype=torch.float64)
    assert_exact(inner.double(), losses, {"x": x})
    assert_exact(Checkpointed().double(), losses, {"x": x})


def test_gradient_hooks_on_parameters_are_refused() -> None:
    model = nn.Linear(3, 2)
    handle = model.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(UnsupportedModuleError, match="gradient hooks"):
        ClippingEngine(model)
    handle.remove()
    ClippingEngine(model)
