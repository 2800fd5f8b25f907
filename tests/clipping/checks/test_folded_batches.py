"""Layers that see the batch and the positions on one axis, the rows of a sample side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping.compare import assert_exact, assert_same_sums, oracle, run
from clipping.tiny_models import (
    VOCABULARY,
    Case,
    Inputs,
    class_losses,
    mixtral,
    token_ids,
    token_losses,
)
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


class Scaled(nn.Module):
    """Has no rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sin()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "layer-norm": lambda: nn.LayerNorm(6),
    "rms-norm": lambda: nn.RMSNorm(6),
    "generic": Scaled,
    "several": lambda: nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 6), nn.LayerNorm(6)
    ),
}


class Folding(nn.Module):
    """Runs a layer on (B T, D), as the feed-forward layers of OPT are."""

    def __init__(self, layer: nn.Module, *, by_position: bool = False) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(5, 6), layer, nn.Linear(6, 2)
        self.by_position = by_position
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        h = self.before(x)
        if self.by_position:
            h = self._folded(h.transpose(0, 1)).view(T, B, 6).transpose(0, 1)
        else:
            h = self._folded(h).view(B, T, 6)
        return self.after(h)

    def _folded(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        if self.recompute:
            return checkpoint(self.layer, flat, use_reentrant=False)
        return self.layer(flat)


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rule_tells_the_samples_apart(name: str, size: int) -> None:
    torch.manual_seed(0)
    model = Folding(LAYERS[name]()).double()
    # As many positions as samples, and other numbers of them.
    for length in (1, 3, 4):
        inputs = {"x": torch.randn(size, length, 5, dtype=torch.float64)}
        assert_exact(model, losses, inputs, 1e-9, clip_norm=0.1)


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_may_change_from_batch_to_batch(name: str) -> None:
    torch.manual_seed(1)
    model = Folding(LAYERS[name]()).double()
    engine = ClippingEngine(model, clip_norm=0.1)
    for size, length in ((1, 4), (3, 4), (2, 3), (4, 1), (5, 2), (0, 3)):
        inputs = {"x": torch.randn(size, length, 5, dtype=torch.float64)}
        engine.reset()
        got = run(engine, losses, inputs)
        if size == 0:
            assert all(not total.any() for total in got.values())
        else:
            assert_same_sums(got, oracle(model, losses, inputs, 0.1).clipped_sum, 1e-9)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "mixed", "instantiate"])
def test_every_strategy(strategy: str) -> None:
    torch.manual_seed(2)
    model = Folding(LAYERS["several"]()).double()
    inputs = {"x": torch.randn(3, 4, 5, dtype=torch.float64)}
    assert_exact(model, losses, inputs, 1e-9, clip_norm=0.1, strategy=strategy)


def test_recomputed_activations() -> None:
    torch.manual_seed(3)
    model = Folding(LAYERS["several"]()).double()
    inputs = {"x": torch.randn(3, 4, 5, dtype=torch.float64)}
    model.recompute = True
    assert_exact(model, losses, inputs, 1e-9, clip_norm=0.1)


class Looking(nn.Module):
    """Looks up the tokens of all samples in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=0)
        self.head = nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids.flatten()).view(*ids.shape, -1).tanh())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_tables(size: int) -> None:
    torch.manual_seed(4)
    inputs = {"x": torch.randint(7, (size, 4))}
    assert_exact(Looking().double(), losses, inputs, 1e-9, clip_norm=0.1)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_in_another_order_are_refused(name: str) -> None:
    engine = ClippingEngine(Folding(LAYERS[name](), by_position=True))
    with pytest.raises(UnsupportedModuleError, match=r"layer.*whatever the others are"):
        run(engine, losses, {"x": torch.randn(3, 4, 5)})


class Table(nn.Module):
    """A linear map of twelve rows that no sample owns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Buffer(torch.randn(12, 5))
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.mix(self.rows)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 11, 12])
def test_a_table_whose_length_is_a_multiple_of_the_batch_is_still_refused(size: int) -> None:
    with pytest.raises(UnsupportedModuleError, match="mix: expected an input whose first axis"):
        run(ClippingEngine(Table()), losses, {"x": torch.randn(size, 12, 5)})


class WithoutInput(nn.Module):
    """A parameter for every position, as the biases of Swin's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 6))

    def forward(self) -> Tensor:
        return self.bias.tanh()


class FoldingWithBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(5, 6), WithoutInput()

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.flatten(0, 1)) + self.shift()).view(*x.shape[:2], -1)


def test_parameters_without_input_are_refused_by_name_unless_frozen() -> None:
    torch.manual_seed(5)
    model = FoldingWithBias().double()
    inputs = {"x": torch.randn(3, 4, 5, dtype=torch.float64)}
    with pytest.raises(UnsupportedModuleError, match=r"shift: expected an input.*freeze"):
        run(ClippingEngine(model), losses, inputs)
    model.shift.requires_grad_(False)
    assert_exact(model, losses, inputs, 1e-9, clip_norm=0.1)


class Router(nn.Module):
    """Takes (B, T, D) and returns a row for every token, as routers to experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(0, 1) @ self.weight.T).softmax(1)


class Routing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.router(x) * self.experts(x.flatten(0, 1))).view(*x.shape[:2], 3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_may_be_folded_though_inputs_are_not(size: int) -> None:
    torch.manual_seed(6)
    inputs = {"x": torch.randn(size, 4, 5, dtype=torch.float64)}
    assert_exact(Routing().double(), losses, inputs, 1e-9, clip_norm=0.1)


class Repeating(nn.Module):
    """Returns its parameter once per sample, as a number told by somebody else has it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor, times: int) -> Tensor:
        return x + self.token.repeat(times, 1).view(times, 2, 3)


class TellingTheSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = Repeating()

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x, len(x)).square()


def test_outputs_of_another_length_are_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="token: expected a module that treats every"):
        run(ClippingEngine(TellingTheSize()), losses, {"x": torch.randn(4, 2, 3)})


def swin(version: int) -> Case:
    from transformers import (
        SwinConfig,
        SwinForImageClassification,
        Swinv2Config,
        Swinv2ForImageClassification,
    )

    settings = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 2],
        "num_heads": [2, 2],
        "window_size": 4,
        "drop_path_rate": 0.0,
    }
    if version == 2:
        model = Swinv2ForImageClassification(Swinv2Config(**settings))
    else:
        model = SwinForImageClassification(SwinConfig(**settings))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("relative_position" not in name)
    return Case(
        model=model, inputs={"pixel_values": torch.randn(3, 3, 16, 16)}, losses=class_losses
    )


@pytest.mark.parametrize("version", [1, 2])
def test_windows_of_swin(version: int) -> None:
    torch.manual_seed(6)
    case = swin(version).to(torch.float64)
    assert_exact(case.model, case.losses, case.inputs, 1e-9, clip_norm=0.5)


class Routed(nn.Module):
    """Two experts, each of which gets the tokens that a router sends it; at first all to one."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.router = nn.Linear(5, 2)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.skips = skips
        for parameter in self.router.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (weights.argmax(1) == number).nonzero().flatten()
            if len(mine) or not self.skips:
                out = out.index_add(0, mine, expert(rows[mine]) * weights[mine, number, None])
        return out.view(x.shape)


@pytest.mark.parametrize("skips", [False, True])
def test_tokens_that_happen_to_be_as_many_as_samples_are_not_taken_for_them(skips: bool) -> None:
    torch.manual_seed(4)
    model = Routed(skips).double()
    engine = ClippingEngine(model, clip_norm=0.3)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    assert_same_sums(
        run(engine, losses, {"x": x}), oracle(model, losses, {"x": x}, 0.3).clipped_sum, 1e-9
    )
    nn.init.normal_(model.router.weight)
    sent = set()
    for _ in range(60):
        x = torch.randn(3, 4, 5, dtype=torch.float64)
        sent.add(int((model.router(x).argmax(2) == 0).sum()))
        engine.reset()
        with pytest.raises(UnsupportedModuleError, match="rows of each of 3 samples"):
            run(engine, losses, {"x": x})
    assert {3, 6} <= sent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2Moe",
        "Qwen3Moe",
        "Olmoe",
        "GraniteMoe",
        "DeepseekV2",
        "DeepseekV3",
        "GptOss",
        "Glm4Moe",
    ],
)
def test_mixtures_of_experts(name: str) -> None:
    import transformers

    torch.manual_seed(8)
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if name.startswith("Deepseek") else 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "use_cache": False,
    }
    if name.startswith("Deepseek"):
        del settings["num_experts"]
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    model.set_experts_implementation("batched_mm")
    # Some backend in float32, whatever the model is in.
    assert_exact(model, token_losses, token_ids(), 1e-6, clip_norm=0.5)


@pytest.mark.filterwarnings("ignore")
def test_compiled_before_any_ordinary_batch_it_is_refused_with_what_to_do() -> None:
    model = Folding(nn.Linear(6, 6))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with (
        ClippingEngine(model),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"layer: run one batch without"),
    ):
        compiled(torch.randn(3, 4, 5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_after_one_ordinary_batch() -> None:
    torch.manual_seed(7)
    case = mixtral().to(torch.float64)
    engine = ClippingEngine(case.model, clip_norm=0.5)
    wanted = run(engine, case.losses, case.inputs)
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    for _ in range(4):
        engine.reset()
        with engine:
            engine.backward(case.losses(compiled, case.inputs))
        assert_same_sums(engine.clipped_sum(), wanted, 1e-9)
