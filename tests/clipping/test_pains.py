"""What users of other libraries suffer from, one test per complaint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping.compare import assert_exact, assert_same_sums, oracle, run, split, total_norm
from clipping.tiny_models import CASES, Inputs, bert_mlm, gemma, gpt2, token_ids, vit
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.errors import UnsupportedModuleError


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


@pytest.mark.parametrize("build", [gpt2, bert_mlm])
def test_stock_models_with_position_ids_broadcast_over_the_batch(build) -> None:  # type: ignore[no-untyped-def]
    case = build().to(torch.float64)
    length = case.inputs["input_ids"].shape[1]

    def with_position_ids(model: nn.Module, inputs: Inputs) -> Tensor:
        logits = model(**inputs, position_ids=torch.arange(length).unsqueeze(0)).logits
        return F.cross_entropy(logits.mT, inputs["input_ids"], reduction="none").sum(1)

    assert_exact(case.model, with_position_ids, case.inputs)


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "llama-tied"])
def test_tied_weights_are_neither_refused_nor_wrong(name: str) -> None:
    case = CASES[name]().to(torch.float64)
    assert case.model.get_input_embeddings().weight is case.model.get_output_embeddings().weight
    assert_exact(case.model, case.losses, case.inputs, clip_norm=0.1)
    engine = ClippingEngine(case.model, clip_norm=0.1)
    for example in split(case.inputs):
        engine.reset()
        assert total_norm(run(engine, case.losses, example)) <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "mixed", "instantiate"])
def test_gradient_accumulation_keeps_every_micro_batch(strategy: str) -> None:
    case = gpt2().to(torch.float64)
    engine = ClippingEngine(case.model, strategy=strategy)
    ids = case.inputs["input_ids"]
    with engine:
        for micro_batch in (ids[:1], ids[1:3], ids[3:]):
            engine.backward(case.losses(case.model, {"input_ids": micro_batch}))
    wanted = oracle(case.model, case.losses, case.inputs, 1.0)
    torch.testing.assert_close(engine.sample_norms, wanted.sample_norms, rtol=1e-9, atol=0)
    assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)


def test_gradient_accumulation_through_plain_backward() -> None:
    case = gpt2().to(torch.float64)
    engine = ClippingEngine(case.model)
    for example in split(case.inputs):
        with engine:
            case.losses(case.model, example).sum().backward()
    wanted = oracle(case.model, case.losses, case.inputs, 1.0)
    assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)


@pytest.mark.parametrize("name", ["gpt2-lora", "llama-lora"])
def test_lora_weights_do_get_a_gradient(name: str) -> None:
    case = CASES[name]()
    got = run(ClippingEngine(case.model), case.losses, case.inputs)
    assert got
    assert all("lora_" in parameter_name for parameter_name in got)
    assert all(value.any() for value in got.values())


@pytest.mark.parametrize("name", ["gpt2", "llama-untied"])
def test_dora_is_exact(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    case = CASES[name]().to(torch.float64)
    target = "c_attn" if name == "gpt2" else "q_proj"
    config = LoraConfig(
        r=2, target_modules=[target], use_dora=True, fan_in_fan_out=name == "gpt2", lora_dropout=0.0
    )
    model = get_peft_model(case.model, config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine = assert_exact(model, case.losses, case.inputs)
    assert any("magnitude" in name for name in engine.clipped_sum())


def test_lora_on_an_embedding_is_exact() -> None:
    from peft import LoraConfig, get_peft_model

    case = gpt2()
    config = LoraConfig(r=2, target_modules=["wte"], init_lora_weights=False)
    model = get_peft_model(case.model, config).double()
    assert_exact(model, case.losses, case.inputs)


def test_bare_parameters_such_as_the_class_token() -> None:
    case = vit().to(torch.float64)
    engine = assert_exact(case.model, case.losses, case.inputs)
    for name in ("cls_token", "position_embeddings"):
        assert engine.clipped_sum()[f"vit.embeddings.{name}"].any()


@pytest.mark.parametrize("how", ["expand", "repeat"])
def test_class_tokens_may_be_expanded_or_repeated(how: str) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 4))
            self.layer = nn.Linear(4, 4)

    class Expanding(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1))

    class Repeating(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.cat([self.token.repeat(len(x), 1, 1), x], 1))

    model = (Expanding if how == "expand" else Repeating)().double()
    engine = assert_exact(model, losses, {"x": torch.randn(3, 5, 4).double()})
    assert {row.kind for row in engine.plan()} == (
        {"broadcast", "linear"} if how == "expand" else {"generic"}
    )
    assert ("one copy of its parameters" in str(engine.plan())) == (how == "repeat")


@pytest.mark.parametrize("name", CASES)
def test_no_parameter_is_dropped_or_silently_frozen(name: str) -> None:
    case = CASES[name]()
    engine = ClippingEngine(case.model)
    trainable = {n for n, p in case.model.named_parameters() if p.requires_grad}
    assert set(engine.clipped_sum()) == trainable
    assert {n for row in engine.plan() for n in row.parameters} == trainable


def test_llama_rms_norm_is_trained() -> None:
    case = CASES["llama-tied"]()
    got = run(ClippingEngine(case.model), case.losses, case.inputs)
    assert all(value.any() for name, value in got.items() if "norm" in name)


def test_four_dimensional_linear_inputs() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    assert_exact(nn.Linear(5, 6).double(), losses, {"x": x})


class TestEmptyBatches:
    def test_an_empty_batch_gives_zeros(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        engine = ClippingEngine(model)
        with engine:
            engine.backward(losses(model, {"x": torch.randn(0, 3)}))
        assert engine.sample_norms.shape == (0,)
        assert not any(value.any() for value in engine.clipped_sum().values())

    @pytest.mark.parametrize(
        "first", [nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.Conv1d(3, 3, 1)], ids=repr
    )
    def test_an_empty_batch_through_plain_backward(self, first: nn.Module) -> None:
        model = nn.Sequential(first, nn.Linear(4, 2), nn.RMSNorm(2), nn.LayerNorm(2))
        engine = ClippingEngine(model)
        with engine:
            losses(model, {"x": torch.zeros(0, 3, 4)}).sum().backward()
        assert not any(value.any() for value in engine.clipped_sum().values())

    def test_a_step_without_any_forward_gives_zeros(self) -> None:
        engine = ClippingEngine(nn.Linear(3, 2))
        assert not any(value.any() for value in engine.clipped_sum().values())

    def test_full_batches_around_an_empty_one(self) -> None:
        model = nn.Linear(3, 2).double()
        x = torch.randn(4, 3, dtype=torch.float64)
        engine = ClippingEngine(model)
        with engine:
            for part in (x[:1], x[:0], x[1:]):
                engine.backward(losses(model, {"x": part}))
        wanted = oracle(model, losses, {"x": x}, 1.0)
        assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)


class TestNonFiniteSamples:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("clip", ["flat", "automatic", "none"])
    @pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "instantiate"])
    def test_they_contribute_zero_and_are_counted(
        self, bad: float, clip: str, strategy: str
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        x[2, 1, 0] = bad
        engine = ClippingEngine(model, clip=clip, strategy=strategy)

        # An infinite input saturates; the loss makes sure that the gradient is not finite.
        def poisoned(model: nn.Module, inputs: Inputs) -> Tensor:
            return losses(model, inputs) * inputs["x"].flatten(1).sum(1)

        got = run(engine, poisoned, {"x": x})
        assert engine.num_nonfinite == 1
        assert not torch.isfinite(engine.sample_norms[2])
        kept = {"x": x[[0, 1, 3]]}
        wanted = oracle(model, poisoned, kept, 1.0, clip=clip)
        assert_same_sums(got, wanted.clipped_sum, 1e-9)

    def test_a_nan_embedding_row_touches_only_its_samples(self) -> None:
        case = gpt2().to(torch.float64)
        with torch.no_grad():
            case.model.transformer.wpe.weight[6] = float("nan")
        ids = case.inputs["input_ids"]
        engine = ClippingEngine(case.model)
        with engine:
            engine.backward(case.losses(case.model, {"input_ids": ids}))
            engine.backward(case.losses(case.model, {"input_ids": ids[:, :6]}))
        assert engine.num_nonfinite == len(ids)
        wanted = oracle(case.model, case.losses, {"input_ids": ids[:, :6]}, 1.0)
        assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)

    def test_a_zero_gradient_is_not_divided_by(self) -> None:
        model = nn.Linear(3, 2)
        engine = ClippingEngine(model)
        got = run(engine, lambda m, i: 0.0 * losses(m, i), {"x": torch.randn(2, 3)})
        assert not engine.sample_norms.any()
        assert not any(value.any() for value in got.values())


def test_padding_row_is_neither_updated_nor_counted() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 3)).double()
    ids = torch.tensor([[1, 0, 2, 0], [3, 3, 0, 0]])
    engine = assert_exact(model, losses, {"x": ids})
    assert not engine.clipped_sum()["0.weight"][0].any()


class HalvedTable(nn.Embedding):
    """A table with a forward of its own, which only the generic rule can handle."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / 2


def test_padding_row_of_a_table_with_its_own_forward() -> None:
    model = nn.Sequential(HalvedTable(6, 4, padding_idx=0), nn.Linear(4, 3)).double()
    nn.init.normal_(model[0].weight)
    engine = assert_exact(model, losses, {"x": torch.tensor([[1, 0, 2, 0], [3, 3, 0, 0]])})
    assert not engine.clipped_sum()["0.weight"][0].any()
    frequencies = nn.Sequential(HalvedTable(6, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
    with pytest.raises(UnsupportedModuleError, match="scale_grad_by_freq"):
        run(ClippingEngine(frequencies), losses, {"x": torch.tensor([[1, 1], [2, 3]])})


def test_tables_with_scaled_rows_keep_no_table_per_sample() -> None:
    case = gemma().to(torch.float64)
    case.inputs["input_ids"][:2, 5:] = 0  # Gemma's padding token
    engine = assert_exact(case.model, case.losses, case.inputs)
    assert {slot.kind for slot in engine._slots if "embed" in slot.path} == {"embedding"}


def test_lengths_may_vary_between_calls() -> None:
    case = gpt2().to(torch.float64)
    engine = ClippingEngine(case.model)
    expected = []
    with engine:
        for length in (2, 9, 5):
            inputs = token_ids(batch=3, length=length)
            engine.backward(case.losses(case.model, inputs))
            expected.append(inputs)
    norms = [oracle(case.model, case.losses, i, 1.0).sample_norms for i in expected]
    torch.testing.assert_close(engine.sample_norms, torch.cat(norms), rtol=1e-9, atol=0)


def test_generate_state_dict_and_schedulers_are_untouched() -> None:
    case = gpt2()
    keys = list(case.model.state_dict())
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prompt = case.inputs["input_ids"]

    def continuation() -> Tensor:
        mask = torch.ones_like(prompt)
        return case.model.generate(
            prompt, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0
        )

    before = continuation()
    engine = ClippingEngine(case.model)
    with engine:
        assert torch.equal(continuation(), before)
        engine.backward(case.losses(case.model, case.inputs))
        assert list(case.model.state_dict()) == keys
    for name, parameter in case.model.named_parameters():
        parameter.grad = engine.clipped_sum()[name]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert continuation().shape == before.shape


def test_frozen_parameters_cost_nothing() -> None:
    case = gpt2()
    case.model.transformer.requires_grad_(False)
    for parameter in case.model.transformer.h[1].mlp.c_proj.parameters():
        parameter.requires_grad_(True)
    engine = ClippingEngine(case.model)
    assert [row.modules for row in engine.plan()] == [("transformer.h.1.mlp.c_proj",)]
    with engine:
        patched = [path for path, m in case.model.named_modules() if "forward" in vars(m)]
    assert patched == ["transformer.h.1.mlp.c_proj"]
    assert set(engine.clipped_sum()) == {
        "transformer.h.1.mlp.c_proj.weight",
        "transformer.h.1.mlp.c_proj.bias",
    }


def test_training_with_only_biases_never_keeps_an_input() -> None:
    case = gpt2().to(torch.float64)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    assert_exact(case.model, case.losses, case.inputs)
