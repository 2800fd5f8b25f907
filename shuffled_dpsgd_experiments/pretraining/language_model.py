"""Pre-train a GPT-2 on public text, without privacy: DART for a private E2E, or the other way.

    python -m shuffled_dpsgd_experiments.pretraining.language_model \
        --public dart --data data/dart --texts qnli=data/qnli --out pretrained/gpt2-dart

The vocabulary is learnt from the same public text. Prompts, targets and plain texts are all
learnt; the held-out loss is that of target tokens, as private training scores them. The weights of
the best epoch are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.integrations.per_sample_loss import next_token_losses
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.tasks.models import no_progress_bars
from shuffled_dpsgd.tasks.start import chosen_device
from shuffled_dpsgd.tasks.text import encode_continuations, evaluate_perplexity
from shuffled_dpsgd.tasks.tokens import Record, TokenCollate, Tokenizer, continuation_labels, ids_of
from shuffled_dpsgd_experiments.pretraining.corpus import PRIVATE_OF, Corpus, read_corpus
from shuffled_dpsgd_experiments.pretraining.options import make_parser
from shuffled_dpsgd_experiments.pretraining.schedule import (
    Pace,
    decayed,
    descend,
    refuse_divergence,
    rounded,
)
from shuffled_dpsgd_experiments.pretraining.vocabulary import learn_tokenizer
from shuffled_dpsgd_experiments.programs import errors_on_one_line

DROPOUT = 0.1
CHECK_EVERY = 20
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


def train(
    model: Any,
    records: Sequence[Record],
    heldout: Sequence[Record],
    collate: TokenCollate,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Train to the end of the epochs or of the time; the model is left with its best weights."""
    device = next(model.parameters()).device
    rng = np.random.default_rng(options.seed)
    optimizer = decayed(model, options.weight_decay)
    steps = options.epochs * -(-len(records) // options.batch_size)
    pace = Pace(num_steps=steps, seconds=options.seconds)
    curve: list[dict[str, float]] = []
    best: dict[str, torch.Tensor] = {}
    model.train()
    while not pace.done:
        for batch in batches(records, options.batch_size, rng):
            inputs, labels = collate(batch)
            # Padding follows the text, where no token looks: attention needs no mask for it.
            ids = inputs["input_ids"].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=ids).logits
            loss = next_token_losses(logits, labels.to(device)).mean()
            descend(model, optimizer, loss, pace, options.learning_rate)
            if pace.step % CHECK_EVERY == 1:
                refuse_divergence(loss, pace)
            if pace.done:
                break
        refuse_divergence(loss, pace)
        found = evaluate_perplexity(model, heldout, collate)
        curve.append(
            {
                "step": pace.step,
                "seconds": round(pace.elapsed, 1),
                "train_loss": round(loss.item(), 4),
                "heldout_loss": round(found.loss, 4),
                "heldout_perplexity": round(found.score, 3),
            }
        )
        print(curve[-1], flush=True)
        if curve[-1]["heldout_loss"] <= min(one["heldout_loss"] for one in curve):
            best = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    return {"steps": pace.step, "seconds": round(pace.elapsed, 1), "curve": curve}


def save(model: Any, tokenizer: Any, options: argparse.Namespace, record: dict[str, Any]) -> Path:
    """The checkpoint without dropout, which private fine-tuning has noise instead of."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, 0.0)
    with no_progress_bars():
        (model.bfloat16() if options.stored == "bf16" else model).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    path: Path = options.out / "pretraining.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


@without_cudnn_attention()
def main(arguments: Sequence[str] | None = None) -> Path:
    """Learn the vocabulary, train, and write checkpoint and record."""
    options = parser().parse_args(arguments)
    device = chosen_device(options.device)
    text_sets = {name: Path(place) for name, _, place in (t.partition("=") for t in options.texts)}
    corpus = read_corpus(options.public, options.data, text_sets, options.max_records)
    public_text = [f"{one.prompt} || {one.target}" for one in corpus.train] + corpus.texts
    tokenizer = learn_tokenizer(public_text, options.vocabulary)
    encoder = Tokenizer(tokenizer)
    model = build(options, tokenizer).to(device)
    collate = TokenCollate(pad_id=encoder.pad_id, labels=continuation_labels)
    records = encode(corpus, encoder, options.max_length)
    heldout = encode_continuations(corpus.heldout, encoder, options.max_length)
    found = train(model, records, heldout, collate, options)
    rounded(model, options.stored)
    final = evaluate_perplexity(model, heldout, collate)
    settings = {k: v for k, v in vars(options).items() if k not in ("data", "texts", "out")}
    record = {
        "what": "public pre-training of a language model; not private",
        **corpus.describe(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "train_tokens": sum(len(ids_of(one)) for one in records),
        "heldout_loss": round(final.loss, 4),
        "heldout_perplexity": round(final.score, 3),
        **found,
        "settings": settings,
        "environment": environment(str(device)),
    }
    path = save(model, tokenizer, options, record)
    print(path, flush=True)
    return path


if __name__ == "__main__":
    with errors_on_one_line():
        main()
