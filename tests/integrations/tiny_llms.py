"""Language models of a few thousand weights, a tokenizer of twelve words, and data in their words.

Skips what imports it where transformers, TRL or PEFT are missing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shuffled_dpsgd.integrations import PrivacyArguments

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *"abcdefgh"]
NUM_RECORDS = 24
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <eos> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    found.chat_template = TEMPLATE
    return found


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def qwen() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)


def lora(**changes: Any) -> Any:
    settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    return peft.LoraConfig(task_type="CAUSAL_LM", **settings | changes)


def _texts(count: int) -> list[str]:
    draws = random.Random(0)
    return [" ".join(draws.choices("abcdefgh", k=draws.randrange(3, 9))) for _ in range(count)]


def _says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def records(kind: str, number: int = NUM_RECORDS) -> Any:
    """Rows of text, chat, completion or pairs, as TRL takes them."""
    a, b, c = _texts(number), _texts(2 * number)[number:], _texts(3 * number)[2 * number :]
    rows = {
        "text": [{"text": x} for x in a],
        "chat": [
            {"messages": [_says("user", x), _says("assistant", y)]}
            for x, y in zip(a, b, strict=True)
        ],
        "completion": [{"prompt": x, "completion": f" {y}"} for x, y in zip(a, b, strict=True)],
        "pairs": [
            {
                "prompt": [_says("user", x)],
                "chosen": [_says("assistant", y)],
                "rejected": [_says("assistant", z)],
            }
            for x, y, z in zip(a, b, c, strict=True)
        ],
    }
    return datasets.Dataset.from_list(rows[kind])


def privacy(**changes: Any) -> PrivacyArguments:
    usual: dict[str, Any] = {"delta": 1e-3, "epsilon": 8.0, "shuffle": "off"}
    return PrivacyArguments(**usual | changes)


def settings(output: Path, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return usual | changes


def sft(output: Path, kind: str = "text", **options: Any) -> Any:
    """A `DPSFTTrainer`; options of the `SFTConfig` go in `config`."""
    from shuffled_dpsgd.integrations import DPSFTTrainer

    config = trl.SFTConfig(**settings(output, **options.pop("config", {})))
    usual = {"model": llama(), "peft_config": lora(), "privacy": privacy()}
    usual["train_dataset"] = records(kind)
    return DPSFTTrainer(args=config, processing_class=tokenizer(), **usual | options)


def dpo(output: Path, **options: Any) -> Any:
    """A `DPDPOTrainer`; options of the `DPOConfig` go in `config`."""
    from shuffled_dpsgd.integrations import DPDPOTrainer

    config = trl.DPOConfig(**settings(output, **options.pop("config", {})))
    usual = {"model": llama(), "peft_config": lora(), "privacy": privacy()}
    return DPDPOTrainer(
        args=config, train_dataset=records("pairs"), processing_class=tokenizer(), **usual | options
    )
