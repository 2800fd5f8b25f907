"""Small instances of real architectures, without dropout, and their per-sample losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 40
Inputs = dict[str, Tensor]
Losses = Callable[[nn.Module, Inputs], Tensor]

ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def token_losses(model: nn.Module, inputs: Inputs) -> Tensor:
    """Next-token loss of each sequence, summed over its tokens."""
    logits = model(**inputs).logits[:, :-1]
    targets = inputs["input_ids"][:, 1:]
    return F.cross_entropy(logits.mT, targets, reduction="none").sum(1)


def class_losses(model: nn.Module, inputs: Inputs) -> Tensor:
    """A loss of each sample from its class scores."""
    return F.cross_entropy(
        model(**inputs).logits,
        torch.zeros(len(next(iter(inputs.values()))), dtype=torch.long),
        reduction="none",
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a batch for it and its per-sample loss."""

    model: nn.Module
    inputs: Inputs
    losses: Losses

    def to(self, dtype: torch.dtype) -> Case:
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}
        return Case(model=self.model.to(dtype), inputs=inputs, losses=self.losses)


def token_ids(batch: int = 4, length: int = 7) -> Inputs:
    # Few distinct tokens, so that rows of the table meet within a sample.
    return {"input_ids": torch.randint(1, 12, (batch, length))}


def gpt2(**changes: object) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": VOCABULARY,
        "n_positions": 24,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = GPT2LMHeadModel(GPT2Config(**(settings | changes)))
    return Case(model=model, inputs=token_ids(), losses=token_losses)


def bert_mlm() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    return Case(
        model=BertForMaskedLM(BertConfig(**ENCODER)), inputs=token_ids(), losses=token_losses
    )


def bert_classifier() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**ENCODER))
    inputs = token_ids() | {"attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2] * 2)}
    return Case(model=model, inputs=inputs, losses=class_losses)


def roberta_mlm() -> Case:
    from transformers import RobertaConfig, RobertaForMaskedLM

    inputs = token_ids()
    inputs["input_ids"][:2, 5:] = 1  # RoBERTa's padding token
    model = RobertaForMaskedLM(RobertaConfig(**ENCODER))
    return Case(model=model, inputs=inputs, losses=token_losses)


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    settings = {
        k: v for k, v in ENCODER.items() if k not in ("vocab_size", "max_position_embeddings")
    }
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **settings))
    inputs = {"pixel_values": torch.randn(4, 3, 8, 8)}
    return Case(model=model, inputs=inputs, losses=class_losses)


def llama(tied: bool) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    return Case(model=LlamaForCausalLM(config), inputs=token_ids(), losses=token_losses)


def gemma() -> Case:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    return Case(model=GemmaForCausalLM(config), inputs=token_ids(), losses=token_losses)


def opt() -> Case:
    """Its feed-forward layers see the batch and the positions on one axis."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=24,
        dropout=0.0,
    )
    return Case(model=OPTForCausalLM(config), inputs=token_ids(), losses=token_losses)


def mixtral() -> Case:
    """Experts, and a router to them, of the tokens of all samples in one row."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=12,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        experts_implementation="batched_mm",
    )
    return Case(model=MixtralForCausalLM(config), inputs=token_ids(), losses=token_losses)


def with_lora(case: Case, targets: list[str], transposed: bool) -> Case:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=transposed,
        init_lora_weights=False,
    )
    return Case(model=get_peft_model(case.model, config), inputs=case.inputs, losses=case.losses)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "bert-mlm": bert_mlm,
    "bert-classifier": bert_classifier,
    "roberta-mlm": roberta_mlm,
    "vit": vit,
    "llama-tied": lambda: llama(tied=True),
    "llama-untied": lambda: llama(tied=False),
    "opt": opt,
    "mixtral": mixtral,
    "gpt2-lora": lambda: with_lora(gpt2(), ["c_attn", "c_fc"], transposed=True),
    "llama-lora": lambda: with_lora(llama(tied=True), ["q_proj", "down_proj"], transposed=False),
}
