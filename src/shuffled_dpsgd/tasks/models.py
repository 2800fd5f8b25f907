"""Models by name: presets built offline, local folders, or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError
from shuffled_dpsgd.tasks.config import ModelConfig

Head = Literal["sequence", "image", "causal-lm"]
_AUTO_CLASSES: Mapping[Head, str] = {
    "sequence": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
    "causal-lm": "AutoModelForCausalLM",
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A configuration to build a model from, with random weights and no download."""

    config_class: str
    head: Head
    settings: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    # Noise drowns a start from the usual std of 0.02 at this width: the first gradients are tiny.
    "vit-digits": Preset(
        config_class="ViTConfig",
        head="image",
        settings={
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 1,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.15,
        },
    ),
    "vit-tiny": Preset(
        config_class="ViTConfig",
        head="image",
        settings={
            "image_size": 32,
            "patch_size": 4,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.1,
        },
    ),
    "bert-tiny": Preset(
        config_class="BertConfig",
        head="sequence",
        settings={
            "vocab_size": 384,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "gpt2-tiny": Preset(
        config_class="GPT2Config",
        head="causal-lm",
        settings={
            "vocab_size": 384,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 257,
            "eos_token_id": 258,
        },
    ),
}


def build_preset(name: str, *, num_labels: int | None = None, seed: int = 0) -> nn.Module:
    """A preset with weights drawn from `seed`, leaving torch's global generator untouched."""
    transformers = _transformers()
    preset = PRESETS.get(name)
    if preset is None:
        raise InvalidArgumentError("model.name", expected=f"one of {sorted(PRESETS)}", got=name)
    settings = dict(preset.settings)
    if num_labels is not None:
        settings["num_labels"] = num_labels
    config = getattr(transformers, preset.config_class)(**settings)
    return _from_config(preset.head, config, seed)


def load_model(
    config: ModelConfig, *, head: Head, num_labels: int | None = None, seed: int = 0
) -> nn.Module:
    """The model `config` names: a preset, else a local folder, else the hub.

    `from_scratch` keeps the architecture and draws new weights; `lora_rank` freezes the weights
    and adds trainable low-rank factors.
    """
    if config.name in PRESETS:
        if PRESETS[config.name].head != head:
            raise InvalidArgumentError(
                "model.name", expected=f"a preset with a {head} head", got=config.name
            )
        model = build_preset(config.name, num_labels=num_labels, seed=seed)
    else:
        model = _pretrained(config, head, num_labels, seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model if config.lora_rank is None else _with_lora(model, head, config.lora_rank)


def _pretrained(config: ModelConfig, head: Head, num_labels: int | None, seed: int) -> nn.Module:
    transformers = _transformers()
    extra = {} if num_labels is None else {"num_labels": num_labels}
    try:
        if config.from_scratch:
            settings = transformers.AutoConfig.from_pretrained(config.name, **extra)
            return _from_config(head, settings, seed)
        auto = getattr(transformers, _AUTO_CLASSES[head])
        mismatch = {} if num_labels is None else {"ignore_mismatched_sizes": True}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return auto.from_pretrained(config.name, **extra, **mismatch)
    except OSError as error:
        raise InvalidArgumentError(
            "model.name",
            expected=f"a preset ({', '.join(sorted(PRESETS))}), a local folder or a hub name",
            got=config.name,
            remedy=str(error).splitlines()[0],
        ) from error


def _from_config(head: Head, settings: Any, seed: int) -> nn.Module:
    auto = getattr(_transformers(), _AUTO_CLASSES[head])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(settings)


def _with_lora(model: nn.Module, head: Head, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft", extra="hf", purpose="model.lora_rank") from error
    kinds = {"sequence": "SEQ_CLS", "causal-lm": "CAUSAL_LM", "image": None}
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        task_type=kinds[head],
        target_modules="all-linear" if head == "image" else None,
        modules_to_save=["classifier"] if head == "image" else None,
    )
    return peft.get_peft_model(model, settings)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", extra="hf", purpose="Transformer models") from error
    return transformers
