"""Families with LoRA adapters: base weights frozen, factors and saved copies trained."""

from __future__ import annotations

from collections.abc import Callable

import peft

from permutation.zoo import FAMILIES, Specimen, randomise


def _adapt(family: str, targets: list[str], **options: object) -> Specimen:
    specimen = FAMILIES[family]()
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, **options)
    model = randomise(peft.get_peft_model(specimen.model, config))
    return Specimen(model=model, batch=specimen.batch, losses=specimen.losses)


ADAPTED: dict[str, Callable[[], Specimen]] = {
    "lora-bert": lambda: _adapt("bert", ["query", "value", "dense"], task_type="SEQ_CLS"),
    "lora-roberta": lambda: _adapt("roberta", ["query", "key"], task_type="SEQ_CLS"),
    "lora-gpt2": lambda: _adapt(
        "gpt2", ["c_attn", "c_proj", "wte"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    ),
    "dora-llama": lambda: _adapt("llama", ["q_proj", "v_proj", "down_proj"], use_dora=True),
    "lora-vit": lambda: _adapt(
        "vit", ["q_proj", "v_proj", "o_proj", "fc1"], modules_to_save=["classifier"]
    ),
}
