"""Every model that has a short name, as data.

Published models carry the name of their checkpoint on the hub. The others have no weights
anywhere: they are small enough to be built from their configuration and trained from scratch,
and they read text as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Head = Literal["sequence", "image", "causal-lm"]
_HEAD_OF_ENDING: Mapping[str, Head] = {
    "ForSequenceClassification": "sequence",
    "ForImageClassification": "image",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
}


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """An architecture of transformers, its configuration class, and what differs from that."""

    architecture: str
    config_class: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def head(self) -> Head | None:
        """What the model ends in."""
        return head_of(self.architecture)


def head_of(architecture: str) -> Head | None:
    """What a model of this class ends in, if it is one of the heads that tasks train.

    >>> head_of("GPT2LMHeadModel"), head_of("ViTForImageClassification"), head_of("ViTModel")
    ('causal-lm', 'image', None)
    """
    endings = (head for end, head in _HEAD_OF_ENDING.items() if architecture.endswith(end))
    return next(endings, None)


def find_named(name: str) -> NamedModel | None:
    """The model with this short name, or with this checkpoint on the hub."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    return next((m for m in CATALOGUE.values() if name and m.checkpoint == name), None)


def _vit(checkpoint: str | None = None, **settings: Any) -> NamedModel:
    return NamedModel(
        architecture="ViTForImageClassification",
        config_class="ViTConfig",
        settings=settings,
        checkpoint=checkpoint,
    )


def _bert(checkpoint: str | None = None, **settings: Any) -> NamedModel:
    return NamedModel(
        architecture="BertForSequenceClassification",
        config_class="BertConfig",
        settings=settings,
        checkpoint=checkpoint,
    )


def _gpt2(
    n_embd: int, n_layer: int, n_head: int, checkpoint: str | None = None, **settings: Any
) -> NamedModel:
    return NamedModel(
        architecture="GPT2LMHeadModel",
        config_class="GPT2Config",
        settings={"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head, **settings},
        checkpoint=checkpoint,
    )


def _llama(**settings: Any) -> NamedModel:
    return NamedModel(
        architecture="LlamaForCausalLM", config_class="LlamaConfig", settings=settings
    )


_NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CATALOGUE: Mapping[str, NamedModel] = MappingProxyType(
    {
        "vit-base": _vit("google/vit-base-patch16-224", num_labels=100),
        "bert-base": _bert("bert-base-uncased"),
        "minilm-l6": _bert(
            "sentence-transformers/all-MiniLM-L6-v2",
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
        ),
        "roberta-base": NamedModel(
            architecture="RobertaForSequenceClassification",
            config_class="RobertaConfig",
            settings={"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
            checkpoint="roberta-base",
        ),
        "distilbert-base": NamedModel(
            architecture="DistilBertForSequenceClassification",
            config_class="DistilBertConfig",
            checkpoint="distilbert-base-uncased",
        ),
        "gpt2": _gpt2(768, 12, 12, "gpt2"),
        "gpt2-medium": _gpt2(1024, 24, 16, "gpt2-medium"),
        "gpt2-large": _gpt2(1280, 36, 20, "gpt2-large"),
        "gpt2-xl": _gpt2(1600, 48, 25, "gpt2-xl"),
        "opt-125m": NamedModel(
            architecture="OPTForCausalLM", config_class="OPTConfig", checkpoint="facebook/opt-125m"
        ),
        "llama-7b": _llama(),
        "llama-70b": _llama(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
        "llama-tiny": _llama(
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            vocab_size=4096,
        ),
        # Noise drowns a start from the usual std of 0.02 at this width: first gradients are tiny.
        "vit-digits": _vit(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            initializer_range=0.15,
            **_NO_DROPOUT,
        ),
        "vit-tiny": _vit(
            image_size=32,
            patch_size=4,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            initializer_range=0.1,
            **_NO_DROPOUT,
        ),
        "bert-tiny": _bert(
            vocab_size=384,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=512,
            **_NO_DROPOUT,
        ),
        "gpt2-tiny": _gpt2(
            64,
            2,
            4,
            vocab_size=384,
            n_positions=512,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=257,
            eos_token_id=258,
        ),
    }
)
