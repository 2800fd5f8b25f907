"""A byte-level BPE vocabulary of one's own, learnt from public text alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

END, PAD = "<|endoftext|>", "<|pad|>"


def learn_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A fast tokenizer of at most `size` tokens; any text can be written in it, byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        model_input_names=["input_ids", "attention_mask"],
    )
