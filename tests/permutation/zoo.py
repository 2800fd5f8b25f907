"""Small models of every family, with all parameters randomised, and a padded probe batch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

VOCAB, LENGTH, BATCH, LABELS = 29, 7, 3, 4
SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "num_labels": LABELS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 16,
}


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A model, a batch for it, and how to read one loss per sample off its output."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    losses: Callable[[torch.Tensor], torch.Tensor]

    def logits(self) -> torch.Tensor:
        output = self.model(**self.batch)
        return output if isinstance(output, torch.Tensor) else output.logits

    def double(self) -> Specimen:
        _norm_in_float64(self.model)
        batch = {k: v.double() if v.is_floating_point() else v for k, v in self.batch.items()}
        return Specimen(model=self.model.double(), batch=batch, losses=self.losses)


FLOAT32_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "T5LayerNorm", "MT5LayerNorm")


def _norm_in_float64(model: nn.Module) -> None:
    """Llama's own norm computes in float32 whatever its input; PyTorch's same norm does not."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in FLOAT32_NORMS:
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter, biases and norms too, a value no initialisation would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval()


def text_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    mask[2, -4:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def _classes(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % LABELS, reduction="none")


def _tokens(logits: torch.Tensor) -> torch.Tensor:
    labels = text_batch()["input_ids"]
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=0)
    return loss.sum(dim=1)


def _gpt2_config() -> transformers.GPT2Config:
    return transformers.GPT2Config(
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=16,
        vocab_size=VOCAB,
        num_labels=LABELS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _opt_config(**changes: object) -> transformers.OPTConfig:
    return transformers.OPTConfig(
        **{
            "hidden_size": 24,
            "word_embed_proj_dim": 24,
            "ffn_dim": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "max_position_embeddings": 16,
            "vocab_size": VOCAB,
            "num_labels": LABELS,
            "pad_token_id": 0,
            **changes,
        }
    )


def _llama_config(**changes: object) -> transformers.LlamaConfig:
    shape = {**SMALL, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.LlamaConfig(**{**shape, **changes})


def _distilbert_config() -> transformers.DistilBertConfig:
    return transformers.DistilBertConfig(
        dim=24,
        n_layers=2,
        n_heads=3,
        hidden_dim=40,
        vocab_size=VOCAB,
        num_labels=LABELS,
        max_position_embeddings=16,
    )


def _vit_config() -> transformers.ViTConfig:
    shape = {k: v for k, v in SMALL.items() if "token" not in k and k != "vocab_size"}
    return transformers.ViTConfig(**{**shape, "image_size": 8, "patch_size": 4, "num_channels": 2})


def _text(build: Callable[[], nn.Module], losses: Callable[..., torch.Tensor]) -> Specimen:
    return Specimen(model=randomise(build()), batch=text_batch(), losses=losses)


def _both_sides(build: Callable[[], nn.Module]) -> Specimen:
    """An encoder-decoder that reads a text and is scored on the tokens of the same text."""
    batch = text_batch()
    batch["decoder_input_ids"] = batch["input_ids"].roll(1, dims=1)
    return Specimen(model=randomise(build()), batch=batch, losses=_tokens)


def _t5_config(kind: type[Any] = transformers.T5Config, **changes: object) -> Any:
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 3}
    return kind(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **(sizes | changes))


def _bart_config(kind: type[Any] = transformers.BartConfig, **changes: object) -> Any:
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 3), ("ffn_dim", 20))
    }
    return kind(
        vocab_size=VOCAB, d_model=12, max_position_embeddings=16, pad_token_id=0, **sizes, **changes
    )


def _vit() -> Specimen:
    model = randomise(transformers.ViTForImageClassification(_vit_config()))
    pixels = torch.randn(BATCH, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    return Specimen(model=model, batch={"pixel_values": pixels}, losses=_classes)


FAMILIES: dict[str, Callable[[], Specimen]] = {
    "bert": lambda: _text(
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)),
        _classes,
    ),
    "bert-mlm": lambda: _text(
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), _tokens
    ),
    "bert-mlm-untied": lambda: _text(
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**SMALL, tie_word_embeddings=False)
        ),
        _tokens,
    ),
    "bert-tokens": lambda: _text(
        lambda: transformers.BertForTokenClassification(transformers.BertConfig(**SMALL)),
        lambda logits: logits.square().sum(dim=(1, 2)),
    ),
    "roberta": lambda: _text(
        lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SMALL)),
        _classes,
    ),
    "roberta-mlm": lambda: _text(
        lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL)), _tokens
    ),
    "xlm-roberta": lambda: _text(
        lambda: transformers.XLMRobertaForSequenceClassification(
            transformers.XLMRobertaConfig(**SMALL)
        ),
        _classes,
    ),
    "camembert-mlm": lambda: _text(
        lambda: transformers.CamembertForMaskedLM(transformers.CamembertConfig(**SMALL)), _tokens
    ),
    "distilbert": lambda: _text(
        lambda: transformers.DistilBertForSequenceClassification(_distilbert_config()), _classes
    ),
    "distilbert-mlm": lambda: _text(
        lambda: transformers.DistilBertForMaskedLM(_distilbert_config()), _tokens
    ),
    "t5": lambda: _both_sides(lambda: transformers.T5ForConditionalGeneration(_t5_config())),
    "t5-gated-untied": lambda: _both_sides(
        lambda: transformers.T5ForConditionalGeneration(
            _t5_config(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
        )
    ),
    "mt5": lambda: _both_sides(
        lambda: transformers.MT5ForConditionalGeneration(_t5_config(transformers.MT5Config))
    ),
    "bart": lambda: _both_sides(lambda: transformers.BartForConditionalGeneration(_bart_config())),
    "mbart": lambda: _both_sides(
        lambda: transformers.MBartForConditionalGeneration(_bart_config(transformers.MBartConfig))
    ),
    "vit": _vit,
    "gpt2": lambda: _text(lambda: transformers.GPT2LMHeadModel(_gpt2_config()), _tokens),
    "gpt2-classes": lambda: _text(
        lambda: transformers.GPT2ForSequenceClassification(_gpt2_config()), _classes
    ),
    "opt": lambda: _text(lambda: transformers.OPTForCausalLM(_opt_config()), _tokens),
    "opt-classes": lambda: _text(
        lambda: transformers.OPTForSequenceClassification(_opt_config()), _classes
    ),
    "opt-norms-after": lambda: _text(
        lambda: transformers.OPTForCausalLM(
            _opt_config(do_layer_norm_before=False, word_embed_proj_dim=16)
        ),
        _tokens,
    ),
    "llama": lambda: _text(lambda: transformers.LlamaForCausalLM(_llama_config()), _tokens),
    "llama-biased-tied": lambda: _text(
        lambda: transformers.LlamaForCausalLM(
            _llama_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        ),
        _tokens,
    ),
    "mistral": lambda: _text(
        lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**SMALL, num_key_value_heads=3, sliding_window=4)
        ),
        _tokens,
    ),
    "qwen2": lambda: _text(
        lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                **{**SMALL, "num_attention_heads": 6},
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        ),
        _tokens,
    ),
}
