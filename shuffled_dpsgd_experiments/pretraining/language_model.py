"""Pre-train a GPT-2 on public text, without privacy: DART for a private E2E, or the other way.

    python -m shuffled_dpsgd_experiments.pretraining.language_model \
        --public dart --data data/dart --texts qnli=data/qnli --out pretrained/gpt2-dart

The vocabulary is learnt from the same public text. Prompts, targets and plain texts are all
learnt; the held-out loss is that of target tokens, as private training scores them. The weights of
the best epoch are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import next_token_losses
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import Continuation, read_continuations, read_texts
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd.tasks.text import encode_continuations, evaluate_perplexity
from shuffled_dpsgd.tasks.tokens import Record, TokenCollate, Tokenizer, continuation_labels, ids_of
from shuffled_dpsgd_experiments.pretraining.common import (
    make_parser,
    pretrain,
    round_as_stored,
    save,
)
from shuffled_dpsgd_experiments.programs import errors_on_one_line

# DART holds a copy of E2E. As public text beside a private E2E it is used without that copy; beside
# a public E2E, the private DART must be trained on without it (`exclude_sources = ["e2e"]`).
PRIVATE_OF = {"dart": "e2e", "e2e": "dart"}
EXCLUDED: dict[str, tuple[str, ...]] = {"dart": ("e2e",), "e2e": ()}
END, PAD = "<|endoftext|>", "<|pad|>"
DROPOUT = 0.1
_POOL = 50


def parser() -> argparse.ArgumentParser:
    found = make_parser(
        "language_model",
        __doc__.split("\n", 1)[0],
        hidden=768,
        layers=5,
        heads=12,
        batch_size=256,
        epochs=20,
    )
    add = found.add_argument
    add("--public", required=True, choices=sorted(PRIVATE_OF), help="the public set")
    add("--data", required=True, type=Path, help="its folder")
    add("--texts", action="append", default=[], metavar="FORMAT=FOLDER", help="more public text")
    add("--vocabulary", type=int, default=8192)
    add("--positions", type=int, default=256)
    add("--max-length", type=int, default=128)
    return found


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Records to train on and held-out ones of the public set, and plain texts from elsewhere."""

    public: str
    train: list[Continuation]
    heldout: list[Continuation]
    texts: list[str]
    text_sets: tuple[str, ...]

    def describe(self) -> dict[str, object]:
        """What the checkpoint has seen and what it has not."""
        private = PRIVATE_OF[self.public]
        return {
            "public": self.public,
            "excluded_sources": list(EXCLUDED[self.public]),
            "private_later": private,
            "train_records": len(self.train),
            "heldout_records": len(self.heldout),
            "other_public_texts": len(self.texts),
            "other_public_sets": list(self.text_sets),
            "note": f"not private; no record of {PUBLISHED[private].title} was read",
        }


def read_corpus(
    public: str, folder: Path, text_sets: dict[str, Path], max_records: int | None = None
) -> Corpus:
    """The public set from `folder`, and the sentences of further sets, by format and folder.

    Raises:
        InvalidArgumentError: a further set is one of the two the runs are about.
    """
    fitting = [name for name, facts in PUBLISHED.items() if facts.task == "text-classification"]
    for name in text_sets:
        if name not in fitting:
            raise InvalidArgumentError("--texts", expected=f"one of {fitting}", got=name)

    def config(name: str, place: Path, **more: Any) -> DataConfig:
        most = {"max_train_examples": max_records, "max_heldout_examples": max_records}
        return DataConfig(format=name, path=str(place), **most, **more)  # type: ignore[arg-type]

    splits = read_continuations(config(public, folder, exclude_sources=EXCLUDED[public]))
    texts = []
    for name, place in text_sets.items():
        found = read_texts(config(name, place), len(PUBLISHED[name].classes))
        texts += [text for record in found.train for text in record.texts if text.strip()]
    return Corpus(
        public=public,
        train=splits.train,
        heldout=splits.heldout["dev"],
        texts=texts,
        text_sets=tuple(text_sets),
    )


def learn_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE of at most `size` tokens, in which any text can be written byte by byte."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        model_input_names=["input_ids", "attention_mask"],
    )


def build(options: argparse.Namespace, tokenizer: Any) -> Any:
    """A GPT-2 of the size asked for, with new weights.

    Its activation is GPT-2's own in one operation. The usual name for it, `gelu_new`, is eight,
    some of which run in float32 whatever the rest does.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(options.seed)
    config = GPT2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        n_positions=options.positions,
        n_embd=options.hidden,
        n_layer=options.layers,
        n_head=options.heads,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config)


def encode(corpus: Corpus, tokenizer: Tokenizer, max_length: int) -> list[Record]:
    """Every record from its first token on, and every plain text, each with its end."""
    records: list[Record] = [
        (ids_of(record), 0) for record in encode_continuations(corpus.train, tokenizer, max_length)
    ]
    for ids in tokenizer.encode_plain(corpus.texts):
        records.append(([*ids[: max_length - 1], tokenizer.end_id], 0))
    return records


def batches(
    records: Sequence[Record], size: int, rng: np.random.Generator
) -> Iterator[list[Record]]:
    """One epoch in random order, records of like length together."""
    order = rng.permutation(len(records))
    groups = []
    for pool in np.array_split(order, max(len(order) // (size * _POOL), 1)):
        ranked = sorted(pool.tolist(), key=lambda i: len(ids_of(records[i])))
        groups += [ranked[at : at + size] for at in range(0, len(ranked), size)]
    for at in rng.permutation(len(groups)):
        yield [records[i] for i in groups[at]]


@without_cudnn_attention()
def main(arguments: Sequence[str] | None = None) -> Path:
    """Learn the vocabulary, train, and write checkpoint and record."""
    options = parser().parse_args(arguments)
    device = chosen_device(options.device)
    text_sets = {name: Path(place) for name, _, place in (t.partition("=") for t in options.texts)}
    corpus = read_corpus(options.public, options.data, text_sets, options.max_records)
    public_text = [f"{one.prompt} || {one.target}" for one in corpus.train] + corpus.texts
    vocabulary = learn_tokenizer(public_text, options.vocabulary)
    tokenizer = Tokenizer(vocabulary)
    model = build(options, vocabulary).to(device)
    collate = TokenCollate(pad_id=tokenizer.pad_id, labels=continuation_labels)
    records = encode(corpus, tokenizer, options.max_length)
    heldout = encode_continuations(corpus.heldout, tokenizer, options.max_length)
    rng = np.random.default_rng(options.seed)

    def losses() -> Iterator[torch.Tensor]:
        for batch in batches(records, options.batch_size, rng):
            inputs, labels = collate(batch)
            # Padding follows the text, where no token looks: attention needs no mask for it.
            ids = inputs["input_ids"].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=ids).logits
            yield next_token_losses(logits, labels.to(device)).mean()

    def evaluate() -> dict[str, float]:
        found = evaluate_perplexity(model, heldout, collate)
        return {"heldout_loss": found.loss, "heldout_perplexity": found.score}

    steps = -(-len(records) // options.batch_size)
    done = pretrain(model, losses, evaluate, options, steps_per_epoch=steps, keeps_best=True)
    round_as_stored(model, options)
    record = {
        "what": "public pre-training of a language model; not private",
        **corpus.describe(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(vocabulary),
        "train_tokens": sum(len(ids_of(one)) for one in records),
        **{name: round(value, 4) for name, value in evaluate().items()},
        **done,
    }
    # Private fine-tuning has noise instead of dropout.
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, 0.0)
    path = save(model, options, record)
    vocabulary.save_pretrained(options.out)
    return path


if __name__ == "__main__":
    with errors_on_one_line():
        main()
