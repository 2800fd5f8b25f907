"""Training works with what people use: LoRA, checkpointed and compiled models, frozen halves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import classification_losses
from shuffled_dpsgd.models import checkpoint_activations
from shuffled_dpsgd.tasks.tokens import TokenCollate, TokenRecords, class_labels
from shuffled_dpsgd.training import PrivateTraining, make_private
from training.cases import (
    Case,
    bert_case,
    classify_sentences,
    distance,
    make_bert,
    make_mlp,
    mlp_case,
    run,
    weights,
)


def start(model: nn.Module, **changes: Any) -> PrivateTraining:
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 8,
        "num_steps": 3,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "batch_clip_norm": 2.0,
        "seed": 3,
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    return make_private(model, torch.optim.AdamW(trainable, lr=0.01), **(settings | changes))


def test_lora_factors_train_and_the_frozen_base_keeps_its_function() -> None:
    peft = pytest.importorskip("peft")
    case = bert_case()
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(make_bert(), config)
    with pytest.raises(InvalidArgumentError, match="scope='full'"):
        start(model, shuffle="every-step", scope="paper")
    before = weights(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    private = start(model, shuffle="every-step", scope="full")
    assert {name for block in private.plan.blocks for name in block.parameters} == trainable
    run(private, case)
    after = weights(model)
    lora = [name for name in trainable if "lora_" in name]
    assert lora
    assert all(not torch.equal(before[name], after[name]) for name in lora)
    assert {group.kind for group in private.spec.groups} == {"lora-rank"}  # type: ignore[union-attr]
    assert all(torch.equal(before[name], after[name]) for name in set(before) - trainable)


def test_gradient_checkpointing_changes_nothing() -> None:
    finals = []
    for checkpointed in (False, True):
        case = bert_case()
        model = make_bert()
        model.train()
        if checkpointed:
            checkpoint_activations(model)
        private = start(model)
        run(private, Case(make=case.make, data=case.data, loss=classify_sentences))
        finals.append(weights(private.model))
    assert distance(*finals) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_are_trained_under_their_own_names() -> None:
    finals = []
    for compiled in (False, True):
        case = mlp_case()
        model = make_mlp()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        private = start(called, shuffle="off", batch_clip_norm=None)
        for batch in private.batches(case.data):
            private.backward(case.loss(called, batch))
            private.step()
        finals.append(weights(private.model))
        assert list(finals[-1]) == list(weights(make_mlp()))
    assert distance(*finals) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Some shapes come several times in a row in every step, or none does.
@pytest.mark.filterwarnings("ignore:the most frequent row")
@pytest.mark.parametrize("physical", [16, 120])
def test_padded_batches_of_any_length_compile_in_the_first_steps_only(physical: int) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    lengths = random.Random(0)
    data = TokenRecords([([1 + i % 7] * lengths.randint(2, 30), i % 3) for i in range(1200)])
    model = make_bert(positions=32).train()
    called = torch.compile(model, backend="aot_eager")
    private = start(
        model,
        dataset_size=1200,
        expected_batch_size=120,
        num_steps=12,
        delta=1e-4,
        physical_batch_size=physical,
    )
    collate = TokenCollate(pad_id=0, labels=class_labels)
    graphs, shapes = [], set()
    for inputs, labels in private.batches(data, collate=collate, pad_batches=True):
        shapes.add(inputs["input_ids"].shape)
        private.backward(classification_losses(called(**inputs).logits, labels))
        if private.step():
            graphs.append(counters["stats"]["unique_graphs"])
    assert len(graphs) == 12
    assert len(shapes) > 4
    assert 0 < graphs[1] == graphs[-1]


def test_a_frozen_half_is_left_alone() -> None:
    case = mlp_case()
    model = make_mlp()
    model[0].requires_grad_(False)
    before = weights(model)
    private = start(model, shuffle="off", batch_clip_norm=None)
    run(private, case)
    after = weights(model)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    assert [block.parameters for block in private.plan.blocks] == [("2.weight", "2.bias")]


def test_pure_bf16_weights_get_their_noise_in_float32() -> None:
    case = mlp_case()
    model = make_mlp().to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"4 trainable parameters are bfloat16, first 0\.weight"):
        private = start(model, shuffle="off", batch_clip_norm=None)
    data = torch.utils.data.TensorDataset(case.data.tensors[0].bfloat16(), case.data.tensors[1])
    run(private, Case(make=make_mlp, data=data, loss=case.loss))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert private.steps_taken == 3


def test_float16_weights_are_refused_before_anything_is_spent() -> None:
    model = make_mlp().half()
    with pytest.raises(InvalidArgumentError, match=r"0\.weight: expected trainable weights in fl"):
        start(model, shuffle="off", batch_clip_norm=None)
    model[0].requires_grad_(False)  # type: ignore[index]
    model[2].float()  # type: ignore[index]
    start(model, shuffle="off", batch_clip_norm=None)
