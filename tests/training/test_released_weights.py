"""A card knows the weights it is about, whatever they are saved by and called."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import PrivateTraining, compare_weights, make_private
from training.cases import make_bert, make_mlp, mlp_case, vectors

pytestmark = pytest.mark.filterwarnings("ignore:δ = ")


def trained(model: nn.Module, **changes: Any) -> tuple[PrivateTraining, dict[str, Any]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings: dict[str, Any] = {"shuffle": "off", "num_steps": 2, "noise_multiplier": 1.0}
    private = make_private(
        model, optimizer, dataset_size=40, expected_batch_size=8, delta=1e-3, **settings | changes
    )
    return private, settings


def released_mlp(**changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = make_mlp()
    private, _ = trained(model, **changes)
    for batch in private.batches(vectors()):
        private.backward(mlp_case().loss(model, batch))
        private.step()
    private.release()
    card = json.loads(private.card().dumps())
    private.close()
    return model, card


def train_on(model: nn.Module) -> None:
    """Without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = vectors().tensors
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("shuffle", ["off", "every-step", "at-release"])
def test_whatever_was_saved_right_after_the_release_is_known(shuffle: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, card = released_mlp(shuffle=shuffle)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    renamed = {f"module.{name}": value for name, value in model.state_dict().items()}
    for saved in (model, model.state_dict(), renamed, tmp_path / "weights.pt", tmp_path):
        compare_weights(card, saved)


@pytest.mark.filterwarnings("ignore:the weights about to be saved")
def test_weights_that_were_trained_on_are_refused_however_they_were_saved(tmp_path: Path) -> None:
    model, card = released_mlp()
    train_on(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for saved in (model, model.state_dict(), tmp_path / "weights.pt", tmp_path):
        with pytest.raises(InvalidArgumentError, match="trained tensors that are others"):
            compare_weights(card, saved)


def test_one_changed_or_added_or_missing_tensor_is_enough() -> None:
    model, card = released_mlp()
    weights = model.state_dict()
    name = next(iter(weights))
    with pytest.raises(InvalidArgumentError, match="1 of"):
        compare_weights(card, weights | {name: weights[name] + 1e-6})
    with pytest.raises(InvalidArgumentError, match="1 of"):
        compare_weights(card, {k: v for k, v in weights.items() if k != name})
    with pytest.raises(InvalidArgumentError, match="nobody released"):
        compare_weights(card, weights | {"another": torch.zeros(3)})


def test_frozen_tensors_may_be_left_out_and_may_not_be_changed() -> None:
    model = make_bert()
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    private, _ = trained(model)
    private.release()
    card = json.loads(private.card().dumps())
    private.close()
    compare_weights(card, {n: p for n, p in model.named_parameters() if p.requires_grad})
    compare_weights(card, model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.bert.embeddings.word_embeddings.weight[0] += 1.0
    with pytest.raises(InvalidArgumentError, match="nobody released"):
        compare_weights(card, changed)


@pytest.mark.filterwarnings("ignore:the weights about to be saved")
def test_folders_of_transformers_and_peft_are_known(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = make_bert()
    private, _ = trained(model)
    private.release()
    card = json.loads(private.card().dumps())
    private.close()
    model.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    compare_weights(card, tmp_path / "whole")
    compare_weights(card, AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole"))
    lora = get_peft_model(model, LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    private, _ = trained(lora)
    private.release()
    card = json.loads(private.card().dumps())
    private.close()
    lora.save_pretrained(tmp_path / "adapter")
    compare_weights(card, tmp_path / "adapter")
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.add_(0.1)
    lora.save_pretrained(tmp_path / "changed")
    with pytest.raises(InvalidArgumentError, match="trained tensors that are others"):
        compare_weights(card, tmp_path / "changed")


def test_a_card_before_the_release_knows_none() -> None:
    private, _ = trained(make_mlp())
    with pytest.raises(InvalidArgumentError, match="after private"):
        compare_weights(private.card().to_json(), private.model)
    with pytest.raises(InvalidArgumentError, match="folder or a file"):
        compare_weights({"weights": {"trained": ["0"]}}, "/nowhere")


def test_saving_other_weights_than_the_released_ones_is_warned_of(tmp_path: Path) -> None:
    model = make_bert()
    private, _ = trained(model)
    private.release()
    model.save_pretrained(tmp_path / "as released")
    torch.save(model, tmp_path / "pickled")
    with torch.no_grad():
        model.classifier.weight.add_(0.1)
    for save in (
        lambda: model.save_pretrained(tmp_path / "others"),
        lambda: torch.save(model.state_dict(), tmp_path / "others.pt"),
        lambda: copy.deepcopy(model).state_dict(),
    ):
        with pytest.warns(UserWarning, match="others than release"):
            save()
    assert "weights that the model has now: they are others" in str(private.card())
    private.close()
    with pytest.warns(UserWarning, match="others than release"):
        model.save_pretrained(tmp_path / "closed")


def test_the_watch_is_plain_to_others_and_ends_with_the_next_run(tmp_path: Path) -> None:
    model, _ = released_mlp()
    train_on(model)
    torch.save(model, tmp_path / "pickled")
    assert b"shuffled_dpsgd" not in (tmp_path / "pickled").read_bytes()
    with warnings.catch_warnings(action="error"):
        torch.load(tmp_path / "pickled", weights_only=False).state_dict()
        private, _ = trained(nn.Sequential(model))
        private.model.state_dict()
