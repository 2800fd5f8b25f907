"""What is found, what is refused, and the reason given."""

from __future__ import annotations

import json
import math

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from permutation.custom import CUSTOM
from permutation.zoo import FAMILIES, SMALL, randomise, text_batch
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import Group, PermutationSpec, apply, discover, draw, verify


def of_kind(spec: PermutationSpec, kind: str) -> list[Group]:
    return [group for group in spec.groups if group.kind == kind]


def with_config(**changes: object) -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(**{**SMALL, **changes})
    return transformers.BertForSequenceClassification(config)


def test_paper_scope_is_theorems_one_and_two() -> None:
    spec = discover(FAMILIES["vit"]().model, scope="paper")
    assert {group.kind for group in spec.groups} == {"mlp-hidden", "query-key", "value-output"}
    assert [group.size for group in of_kind(spec, "mlp-hidden")] == [40, 40]
    assert [group.size for group in of_kind(spec, "query-key")] == [8] * 6
    shared = of_kind(spec, "value-output")[0]
    assert len(of_kind(spec, "value-output")) == 2
    assert {member.block.repeats for member in shared.members} == {3}
    expected = math.prod([math.factorial(40) ** 2, math.factorial(8) ** 8])
    assert spec.log10_group_order == pytest.approx(math.log10(expected))


def test_full_scope_adds_heads_values_per_head_and_the_stream() -> None:
    spec = discover(FAMILIES["vit"]().model, scope="full")
    assert [group.size for group in of_kind(spec, "heads")] == [3, 3]
    assert [group.size for group in of_kind(spec, "value-output")] == [8] * 6
    (stream,) = of_kind(spec, "residual")
    assert stream.size == 24
    names = {(member.parameter, member.axis) for member in stream.members}
    assert {
        ("vit.embeddings.cls_token", 2),
        ("vit.embeddings.position_embeddings", 2),
        ("vit.embeddings.patch_embeddings.projection.weight", 0),
        ("classifier.weight", 1),
    } <= names
    assert spec.unmoved == {
        "classifier.bias": "runs over classes, whose order is the model's output"
    }


def test_rotary_models_have_no_query_key_group() -> None:
    spec = discover(FAMILIES["llama"]().model, scope="full")
    assert not of_kind(spec, "query-key")
    assert sorted(group.size for group in of_kind(spec, "heads")) == [2, 2, 3, 3, 3, 3]
    assert spec.shuffle_ratio == 1.0


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "vit", "gpt2", "opt", "xlm-roberta", "mistral", "qwen2"]
)
def test_full_scope_moves_all_of_the_backbone(family: str) -> None:
    model = FAMILIES[family]().model
    backbone = f"{model.base_model_prefix}."
    assert not [n for n in discover(model, "full").unmoved if n.startswith(backbone)]


def test_a_stream_behind_projections_stays_where_it_is() -> None:
    spec = discover(FAMILIES["opt-norms-after"]().model, scope="full")
    assert not of_kind(spec, "residual")
    assert {group.kind for group in spec.groups} >= {"mlp-hidden", "heads", "value-output"}
    assert any("project_in" in name for name in spec.unmoved)


def test_counts_and_json_agree() -> None:
    model = FAMILIES["bert"]().model
    spec = discover(model, scope="full")
    assert spec.total_parameters == sum(p.numel() for p in model.parameters())
    assert spec.moved_parameters == spec.total_parameters - 4
    found = json.loads(json.dumps(spec.to_json()))
    assert found["shuffle_ratio"] == spec.shuffle_ratio
    assert len(found["groups"]) == len(spec.groups)
    assert found["groups"][0]["members"][0].keys() == {
        "parameter",
        "axis",
        "start",
        "width",
        "repeats",
        "repeat_every",
    }


@pytest.mark.parametrize(
    "kind", [transformers.BertModel, transformers.BertForSequenceClassification]
)
def test_a_bare_backbone_keeps_its_output_axes(kind: type[nn.Module]) -> None:
    """Whoever reads the hidden states would read other features."""
    model = kind(transformers.BertConfig(**SMALL)).eval()
    spec = discover(model, scope="full")
    has_stream = bool(of_kind(spec, "residual"))
    assert has_stream == (kind is not transformers.BertModel)
    if not has_stream:
        assert any("it is the model's output" in note for note in spec.notes)
        before = model(**text_batch()).last_hidden_state
        apply(draw(spec, torch.Generator().manual_seed(0)), model)
        torch.testing.assert_close(model(**text_batch()).last_hidden_state, before)


def test_nothing_to_permute_is_an_empty_spec() -> None:
    model = nn.Linear(3, 2)
    spec = discover(model)
    assert spec.groups == ()
    assert (spec.moved_parameters, spec.shuffle_ratio, spec.log10_group_order) == (0, 0.0, 0.0)
    assert set(spec.unmoved) == {"weight", "bias"}
    before = model.weight.detach().clone()
    apply(draw(spec, torch.Generator()), model)
    assert torch.equal(model.weight, before)
    assert discover(nn.ReLU()).shuffle_ratio == 0.0


def test_an_unknown_architecture_moves_only_what_is_proven() -> None:
    config = transformers.StableLmConfig(**{**SMALL, "num_key_value_heads": 1})
    model = transformers.StableLmForCausalLM(config).eval()
    spec = discover(model, scope="full")
    assert {group.kind for group in spec.groups} == {"mlp-hidden"}
    assert len(spec.groups) == 2
    assert "model.layers.0.self_attn.q_proj.weight" in spec.unmoved
    assert any("StableLmForCausalLM is not described" in note for note in spec.notes)
    verify(model, text_batch(), spec)


@given(
    num_kv_heads=st.integers(1, 3),
    queries_per_group=st.integers(1, 3),
    half_head_dim=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=10, deadline=None)
def test_any_grouping_of_heads_is_exact(
    num_kv_heads: int, queries_per_group: int, half_head_dim: int, seed: int
) -> None:
    config = transformers.LlamaConfig(
        **{
            **SMALL,
            "hidden_size": 36,
            "num_hidden_layers": 1,
            "num_attention_heads": num_kv_heads * queries_per_group,
            "num_key_value_heads": num_kv_heads,
            "head_dim": 2 * half_head_dim,
        }
    )
    model = randomise(transformers.LlamaForCausalLM(config), seed)
    found = verify(model, text_batch(), scope="full", seed=seed, num_draws=1)
    assert found.worst_deviation < 1e-3


def test_an_activation_that_is_not_elementwise_blocks_its_layer() -> None:
    model = with_config()
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.Softmax(dim=-1)
    spec = discover(model, scope="paper")
    hidden = [group.name for group in of_kind(spec, "mlp-hidden")]
    assert hidden == ["bert.encoder.layer.0.mlp", "bert.pooler.dense"]
    reason = spec.unmoved["bert.encoder.layer.1.intermediate.dense.weight"]
    assert "Softmax is not known to be elementwise" in reason


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
def test_answering_questions_is_described(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL, num_key_value_heads=3)
    model = randomise(getattr(transformers, f"{name}ForQuestionAnswering")(config))
    spec = discover(model, scope="full")
    assert list(spec.unmoved) == ["qa_outputs.bias"]
    verify(model, text_batch(), spec)


def test_a_subclass_is_not_trusted() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).cumsum(dim=-1)

    model = with_config()
    layer = model.bert.encoder.layer[0]
    layer.intermediate.dense = Odd(24, 40)
    spec = discover(model, scope="full")
    assert "bert.encoder.layer.0.intermediate.dense.weight" in spec.unmoved
    assert not of_kind(spec, "residual")
    assert any("Odd" in note for note in spec.notes)
    verify(model, text_batch(), spec)


def test_weights_computed_by_hooks_are_not_trusted() -> None:
    model = nn.Sequential(
        torch.nn.utils.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()
    ).append(nn.Linear(5, 2))
    spec = discover(model)
    assert [group.size for group in spec.groups] == [5]
    assert "0.weight_orig" in spec.unmoved
    verify(model.eval(), torch.randn(3, 4), spec)


def test_adapted_pytorch_attention_stays() -> None:
    model = CUSTOM["encoder"]().model
    config = peft.LoraConfig(r=2, target_modules=["self_attn"])
    adapted = randomise(peft.get_peft_model(model, config))
    spec = discover(adapted, scope="full")
    assert {group.kind for group in spec.groups} == {"mlp-hidden", "lora-rank"}
    assert "adds to its projections" in "".join(spec.unmoved.values())
    verify(adapted, CUSTOM["encoder"]().batch, spec)


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(UnsupportedModuleError, match="pass one batch through the model first"):
        discover(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)))


def test_cross_attention_keeps_the_stream() -> None:
    config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=3, add_cross_attention=True)
    spec = discover(transformers.GPT2LMHeadModel(config), scope="full")
    assert not of_kind(spec, "residual")
    assert any("unknown use" in note for note in spec.notes)


def test_layers_that_share_weights_move_alike() -> None:
    model = with_config().eval()
    first, second = model.bert.encoder.layer
    second.intermediate.dense.weight = first.intermediate.dense.weight
    spec = discover(model, scope="paper")
    hidden = [g for g in of_kind(spec, "mlp-hidden") if g.size == 40]
    assert len(hidden) == 1
    assert {m.parameter for m in hidden[0].members} >= {
        "bert.encoder.layer.0.output.dense.weight",
        "bert.encoder.layer.1.output.dense.weight",
        "bert.encoder.layer.1.intermediate.dense.bias",
    }
    verify(model, text_batch(), discover(model, scope="full"))


def test_a_tie_no_group_can_follow_stops_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = with_config(intermediate_size=24)
            self.other = nn.Linear(24, 24)
            self.other.weight = self.bert.bert.encoder.layer[0].intermediate.dense.weight

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            return self.other(self.bert.bert(**batch).pooler_output)

    model = Tied().eval()
    spec = discover(model, scope="full")
    assert "bert.bert.encoder.layer.0.intermediate.dense.weight" in spec.unmoved
    assert "shared with other.weight" in "".join(spec.notes)
    verify(model, text_batch(), spec)


def test_wrappers_that_pass_calls_on_are_looked_through() -> None:
    specimen = FAMILIES["gpt2"]()
    plain = discover(specimen.model, scope="full")
    wrapped = discover(torch.compile(specimen.model, backend="eager"), scope="full")
    assert wrapped.shuffle_ratio == 1.0
    assert wrapped.moved_names == {f"_orig_mod.{name}" for name in plain.moved_names}


def test_a_wrong_scope_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'paper' or 'full'"):
        discover(nn.Linear(2, 2), scope="everything")
