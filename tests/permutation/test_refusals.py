"""What is not proven stays where it is, and what cannot move is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import config as variants
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from permutation.zoo import FAMILIES, SMALL, Specimen, randomise
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import apply, discover, draw, verify

SCOPES = ["paper", "full"]


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))


def tied_by_memory(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data)


def tied_transposed(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data.t())


def overlapping(model: nn.Sequential) -> None:
    memory = torch.randn(42)
    model[0].weight = nn.Parameter(memory[:36].view(6, 6))
    model[2].weight = nn.Parameter(memory[6:].view(6, 6))


def expanded(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(1, 6).expand(6, 6))


@pytest.mark.parametrize("entangle", [tied_by_memory, tied_transposed, overlapping, expanded])
def test_parameters_that_share_memory_stay(entangle: Callable[[nn.Sequential], None]) -> None:
    model = chain()
    entangle(model)
    spec = discover(model)
    assert not spec.groups
    assert "shares memory with" in spec.unmoved["0.bias"]
    assert any("shares memory with" in note for note in spec.notes)


def test_parameters_beside_each_other_in_one_memory_move() -> None:
    model = chain().double()
    memory = torch.randn(72, dtype=torch.float64)
    model[0].weight = nn.Parameter(memory[:36].view(6, 6))
    model[2].weight = nn.Parameter(memory[36:].view(6, 6))
    assert discover(model).groups
    verify(model, torch.randn(3, 6).double())


def test_memory_shared_after_discovery_is_refused_before_anything_moves() -> None:
    model = chain()
    spec = discover(model)
    model[2].weight.data = model[0].weight.data
    before = model[0].bias.detach().clone()
    with pytest.raises(InvalidArgumentError, match=r"2.weight: .*that of 0.weight"):
        apply(draw(spec, torch.Generator()), model)
    assert torch.equal(model[0].bias, before)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_subclass_of_a_known_block_stays_and_keeps_the_stream(scope: str) -> None:
    class Block(GPT2Block):
        pass

    specimen = FAMILIES["gpt2"]().double()
    specimen.model.transformer.h[0].__class__ = Block
    spec = discover(specimen.model, scope=scope)
    verify(specimen.model, specimen.batch, spec)
    assert not any("transformer.h.0.attn" in name for name in spec.moved_names)
    assert any("transformer.h.1.attn" in name for name in spec.moved_names)
    if scope == "full":
        assert any("a known kind of block, " in note for note in spec.notes)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "options",
    [
        {"kasa_config": variants.KasaConfig()},
        {
            "use_bdlora": variants.BdLoraConfig(
                target_modules_bd_a=["query"], target_modules_bd_b=["value"], nblocks=2
            )
        },
    ],
    ids=["kasa", "block-diagonal"],
)
def test_unknown_variants_of_lora_stay(scope: str, options: dict[str, object]) -> None:
    specimen = FAMILIES["bert"]()
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], **options)
    model = randomise(peft.get_peft_model(specimen.model, config)).double()
    spec = discover(model, scope=scope)
    verify(model, specimen.batch, spec)
    assert not any("lora_" in name for name in spec.moved_names)
    name = next(name for name in spec.unmoved if "lora_A" in name)
    assert "Variant" in spec.unmoved[name]


@pytest.mark.parametrize("scope", SCOPES)
def test_keys_and_values_from_a_prefix_keep_everything_in_place(scope: str) -> None:
    specimen = FAMILIES["gpt2"]()
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = randomise(peft.get_peft_model(specimen.model, config)).double()
    spec = discover(model, scope=scope)
    assert not spec.groups
    assert all("hands keys and values" in reason for reason in spec.unmoved.values())
    verify(model, specimen.batch, spec)


def test_data_parallel_is_looked_through() -> None:
    specimen = FAMILIES["gpt2"]()
    inner = discover(specimen.model, scope="full")
    outer = discover(nn.DataParallel(specimen.model), scope="full")
    assert outer.moved_names == {f"module.{name}" for name in inner.moved_names}


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = chain()
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(InvalidArgumentError, match=r"optimizer: .*state would stay behind"):
        apply(draw(discover(model), torch.Generator()), model, optimizer)


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        model = chain()
    with pytest.raises(InvalidArgumentError, match="inference_mode"):
        apply(draw(discover(model), torch.Generator()), model)


def test_verify_needs_weights_draws_and_numbers() -> None:
    with torch.device("meta"):
        empty = chain()
    with pytest.raises(InvalidArgumentError, match=r"model: .*meta device"):
        verify(empty, torch.randn(3, 6))
    with pytest.raises(InvalidArgumentError, match="num_draws"):
        verify(chain(), torch.randn(3, 6), num_draws=0)

    class Choice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(-1)

    with pytest.raises(InvalidArgumentError, match="floating-point"):
        verify(Choice(nn.Linear(6, 6)), torch.randn(3, 6))


def test_verify_allows_for_norms_that_round_to_float32() -> None:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=3)
    specimen: Specimen = FAMILIES["llama"]()
    model = randomise(transformers.LlamaForCausalLM(config)).double()
    checked = verify(model, {**specimen.batch, "use_cache": False}, scope="full")
    assert 1e-12 < checked.worst_deviation < 1e-4


def test_verify_does_not_compare_rounding_with_rounding() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.down(torch.relu(self.up(x)))
            return out, (out - out.mean(-1, keepdim=True)).sum(-1)

    model = randomise(Centred()).double()
    assert discover(model).groups
    assert verify(model, torch.randn(5, 6).double()).output_deviation < 1e-12
