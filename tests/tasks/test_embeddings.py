"""Input embeddings are found by a model's structure, or not at all."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.tasks.config import ModelConfig
from shuffled_dpsgd.tasks.models import choose_trained, find_input_embeddings

transformers = pytest.importorskip("transformers")


def shapes(name: str, **settings: Any) -> Any:
    """A classifier of two layers at most, without memory."""
    config = getattr(transformers, f"{name}Config")(num_labels=2, **settings)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForSequenceClassification")(config)


class Renamed(nn.Module):
    """Names its input embedding, and holds it twice or in another form if asked."""

    def __init__(self, words: nn.Module, again: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.again, self.head = words, again, nn.Linear(2, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.words


@pytest.mark.parametrize("name", ["minilm-l6", "bert-base", "roberta-base", "distilbert-base"])
def test_of_encoders_they_are_the_whole_module_as_it_was_measured(name: str) -> None:
    model = build_model(name, num_labels=2)
    found, why_not = find_input_embeddings(model)
    assert why_not is None
    names = [each for each, _ in model.named_parameters()]
    assert sorted(found) == sorted(fnmatch.filter(names, "*embeddings*"))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("GPT2", {"n_layer": 1}, ["transformer.wte.weight", "transformer.wpe.weight"]),
        ("Llama", {"num_hidden_layers": 1}, ["model.embed_tokens.weight"]),
    ],
)
def test_of_decoders_they_are_the_embeddings_beside_the_words(
    name: str, settings: dict[str, Any], expected: list[str]
) -> None:
    assert list(find_input_embeddings(shapes(name, **settings))[0]) == expected


def test_what_shares_its_weights_is_not_told() -> None:
    tied = build_model("gpt2-tiny")
    assert "lm_head.weight shares" in str(find_input_embeddings(tied)[1])
    words = nn.Embedding(3, 2)
    assert "several places" in str(find_input_embeddings(Renamed(words, words))[1])
    assert find_input_embeddings(Renamed(words)) == (("words.weight",), None)


def test_what_is_no_embedding_is_not_told() -> None:
    for model in (nn.Linear(2, 2), Renamed(nn.Linear(2, 2))):
        assert find_input_embeddings(model)[1] == "the model names no input embedding"


def test_what_is_asked_for_must_be_found_and_what_a_method_chose_need_not() -> None:
    model = Renamed(nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match=r"model.embeddings.*model.freeze"):
        choose_trained(model, ModelConfig(name="x", embeddings="freeze"))
    choose_trained(model, ModelConfig(name="x", embeddings="freeze-if-found"))
    assert all(parameter.requires_grad for parameter in model.parameters())
    good = Renamed(nn.Embedding(3, 2))
    choose_trained(good, ModelConfig(name="x", embeddings="freeze"))
    assert [n for n, p in good.named_parameters() if not p.requires_grad] == ["words.weight"]


def test_one_key_says_what_is_trained() -> None:
    with pytest.raises(InvalidArgumentError, match="nothing beside freeze"):
        ModelConfig(name="x", embeddings="freeze", freeze=("*",))
