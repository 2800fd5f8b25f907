"""Model names to Hugging Face models built from their configuration, offline.

Built on the meta device by default: shapes without weights, whatever the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A published architecture: its class, its configuration class, and what differs from it."""

    architecture: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str = ""


def _gpt2(checkpoint: str, n_embd: int, n_layer: int, n_head: int) -> NamedModel:
    return NamedModel(
        architecture="GPT2LMHeadModel",
        config="GPT2Config",
        settings={"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head},
        checkpoint=checkpoint,
    )


MODELS: dict[str, NamedModel] = {
    "vit-base": NamedModel(
        architecture="ViTForImageClassification",
        config="ViTConfig",
        settings={"num_labels": 100},
        checkpoint="google/vit-base-patch16-224",
    ),
    "bert-base": NamedModel(
        architecture="BertForSequenceClassification",
        config="BertConfig",
        checkpoint="bert-base-uncased",
    ),
    "roberta-base": NamedModel(
        architecture="RobertaForSequenceClassification",
        config="RobertaConfig",
        settings={"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        checkpoint="roberta-base",
    ),
    "distilbert-base": NamedModel(
        architecture="DistilBertForSequenceClassification",
        config="DistilBertConfig",
        checkpoint="distilbert-base-uncased",
    ),
    "gpt2": _gpt2("gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 1600, 48, 25),
    "opt-125m": NamedModel(
        architecture="OPTForCausalLM", config="OPTConfig", checkpoint="facebook/opt-125m"
    ),
    "llama-tiny": NamedModel(
        architecture="LlamaForCausalLM",
        config="LlamaConfig",
        settings={
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
        },
    ),
    "llama-7b": NamedModel(architecture="LlamaForCausalLM", config="LlamaConfig"),
}


def named_model(name: str) -> NamedModel:
    """Look a model up by its short name or by its checkpoint's name on the hub."""
    for short, model in MODELS.items():
        if name and name in (short, model.checkpoint):
            return model
    raise InvalidArgumentError(
        "model",
        expected=f"one of {', '.join(MODELS)}, or the directory of a saved model",
        got=name,
    )


def build_model(
    name: str,
    *,
    device: str = "meta",
    num_labels: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Build the named model, or the one saved in a directory, from its configuration alone.

    `settings` override single entries of the configuration; off the meta device the weights are
    random. A saved model's own weights are not read.
    """
    transformers = _transformers()
    changes = dict(settings or {})
    if num_labels is not None:
        changes["num_labels"] = num_labels
    if name and (Path(name) / "config.json").is_file():
        config = _saved_config(transformers, name, changes)
        architecture = next(iter(config.architectures or ()), "")
    else:
        found = named_model(name)
        config = getattr(transformers, found.config)(**{**found.settings, **changes})
        architecture = found.architecture
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise InvalidArgumentError(
            "model",
            expected="a configuration that names an architecture of transformers",
            got=architecture or "none",
            remedy="save the model with save_pretrained",
        )
    if num_labels is not None and not architecture.endswith("Classification"):
        raise InvalidArgumentError(
            "num_labels",
            expected="a model that classifies",
            got=architecture,
            remedy="leave the number of classes out",
        )
    import torch

    with torch.device(device):
        return kind(config)


def _saved_config(transformers: ModuleType, directory: str, changes: Mapping[str, Any]) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, **changes)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            "model",
            expected=f"a configuration of transformers in {Path(directory) / 'config.json'}",
            got=str(error).splitlines()[0],
            remedy="save the model with save_pretrained",
        ) from error


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", extra="hf", purpose="building models") from error
    return transformers
