"""Text tasks: sequence classification (SST-2, QNLI, hub) and causal language models (E2E, DART)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import IGNORED_LABEL, next_token_losses
from shuffled_dpsgd.tasks import folders, hub
from shuffled_dpsgd.tasks.classes import name_classes, stated_classes
from shuffled_dpsgd.tasks.classification import classification_task, heldout_batches
from shuffled_dpsgd.tasks.config import DataConfig, RunConfig
from shuffled_dpsgd.tasks.folders import Continuation, LabelledText
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.parts import check_sizes, take_part
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd.tasks.tokenizers import Tokenizer, load_tokenizer
from shuffled_dpsgd.tasks.tokens import (
    Record,
    TokenCollate,
    TokenRecords,
    class_labels,
    continuation_labels,
)

_CLASSIFICATION = {"sst2": folders.read_sst2, "qnli": folders.read_qnli}
_GENERATION = {"e2e": folders.read_e2e, "dart": folders.read_dart}


def build_classification(config: RunConfig) -> Task:
    """Fine-tune a sequence classifier."""
    data, num_labels = config.data, stated_classes(config.data)

    def read_own(folder: Path, split: str) -> list[LabelledText]:
        return folders.read_labelled_table(folder, split, data, num_labels)

    if data.format == "hub":
        train, heldout = hub.read_labelled_texts(data, num_labels)
    else:
        train, heldout = _read_folder(data, {**_CLASSIFICATION, "csv": read_own, "jsonl": read_own})
    check_sizes(config, train, heldout)
    tokenizer = load_tokenizer(config.model.name)
    model = prepare_model(
        config.model, head="sequence", num_labels=num_labels, seed=config.init_seed
    )
    name_classes(model, data, num_labels)
    samples = [encode_labelled(part, tokenizer, data.max_length) for part in (train, heldout)]
    check_tokens(config, model, *samples)
    return classification_task(
        "text-classification",
        model,
        TokenRecords(samples[0]),
        samples[1],
        collate=TokenCollate(pad_id=tokenizer.pad_id, labels=class_labels),
        save_assets=tokenizer.save,
    )


def build_causal_lm(config: RunConfig) -> Task:
    """Fine-tune a language model to continue prompts; only the continuation is scored."""
    data = config.data

    def read_own(folder: Path, split: str) -> list[Continuation]:
        return folders.read_continuation_table(folder, split, data)

    if data.format == "hub":
        train, heldout = hub.read_continuations(data)
    else:
        train, heldout = _read_folder(data, {**_GENERATION, "csv": read_own, "jsonl": read_own})
    check_sizes(config, train, heldout)
    tokenizer = load_tokenizer(config.model.name)
    model = prepare_model(config.model, head="causal-lm", seed=config.init_seed)
    collate = TokenCollate(pad_id=tokenizer.pad_id, labels=continuation_labels)
    train_samples = encode_continuations(train, tokenizer, data.max_length)
    heldout_samples = encode_continuations(heldout, tokenizer, data.max_length)
    check_tokens(config, model, train_samples, heldout_samples)
    return Task(
        name="causal-lm",
        model=model,
        train_data=TokenRecords(train_samples),
        losses=_continuation_losses,
        evaluate=lambda m: evaluate_perplexity(m, heldout_samples, collate),
        score_name="perplexity",
        collate=collate,
        save_assets=tokenizer.save,
    )


def _read_folder(data: DataConfig, readers: Mapping[str, Callable[[Path, str], list[Any]]]) -> Any:
    if data.format not in readers:
        raise InvalidArgumentError(
            "data.format", expected=f"one of {[*readers, 'hub']} for this task", got=data.format
        )
    if data.path is None:
        raise InvalidArgumentError("data.path", expected="a folder", got=None)
    read = readers[data.format]
    train, heldout = read(Path(data.path), "train"), read(Path(data.path), "dev")
    return take_part(train, data.max_train_examples), take_part(heldout, data.max_heldout_examples)


def check_tokens(
    config: RunConfig, model: nn.Module, *splits: Sequence[tuple[Sequence[int], int]]
) -> None:
    """Refuse texts the model has no positions or no vocabulary for, before any of them is used."""
    known: Any = getattr(model, "config", None)
    positions = getattr(known, "max_position_embeddings", None)
    if positions is not None and "roberta" in getattr(known, "model_type", ""):
        positions -= 2  # Its position ids begin behind that of the padding.
    longest = max((len(ids) for split in splits for ids, _ in split), default=0)
    if positions is not None and longest > positions:
        raise InvalidArgumentError(
            "data.max_length",
            expected=f"at most the {positions} positions of {config.model.name}",
            got=config.data.max_length,
        )
    for split, name in zip(splits, ("training", "held-out"), strict=True):
        empty = next((i for i, (ids, _) in enumerate(split) if not ids), None)
        if empty is not None:
            raise InvalidArgumentError(
                f"{name} record {empty}", expected="at least one token", got="an empty text"
            )
    size = getattr(known, "vocab_size", None)
    largest = max((max(ids) for split in splits for ids, _ in split), default=0)
    if size is not None and largest >= size:
        raise InvalidArgumentError(
            "model.name",
            expected=f"a tokenizer whose tokens are below {size}, as the model's embedding has",
            got=largest,
            remedy="save the model with the tokenizer it was trained with",
        )


def encode_labelled(
    examples: Sequence[LabelledText], tokenizer: Tokenizer, max_length: int
) -> list[Record]:
    """Token ids and class of each example."""
    rows = tokenizer.encode_all([e.texts for e in examples], max_length=max_length)
    return [(ids, example.label) for ids, example in zip(rows, examples, strict=True)]


def encode_continuations(
    examples: Sequence[Continuation], tokenizer: Tokenizer, max_length: int
) -> list[Record]:
    """Ids of prompt, target and end; with the number of ids before the target."""
    encoded = []
    prompts = tokenizer.encode_all_plain([f"{example.prompt} ||" for example in examples])
    targets = tokenizer.encode_all_plain([f" {example.target}" for example in examples])
    for prompt, target in zip(prompts, targets, strict=True):
        # Cut the prompt rather than the target: without a target token there is nothing to learn.
        kept = prompt[: max(max_length - len(target) - 1, 1)]
        ids = [*kept, *target, tokenizer.end_id][:max_length]
        encoded.append((ids, len(kept)))
    return encoded


def _continuation_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return next_token_losses(model(**inputs).logits, labels)


@torch.no_grad()
def evaluate_perplexity(
    model: nn.Module, heldout: Sequence[Any], collate: Callable[[list[Any]], Any]
) -> Evaluation:
    """Mean loss per example, and perplexity per held-out target token."""
    was_training = model.training
    model.eval()
    sample_loss = token_loss = 0.0
    tokens = 0
    for inputs, labels in heldout_batches(model, heldout, collate):
        losses = next_token_losses(model(**inputs).logits, labels)
        counts = (labels[:, 1:] != IGNORED_LABEL).sum(dim=1)
        sample_loss += losses.sum().item()
        token_loss += (losses * counts).sum().item()
        tokens += int(counts.sum())
    model.train(was_training)
    return Evaluation(
        loss=sample_loss / max(len(heldout), 1), score=math.exp(token_loss / max(tokens, 1))
    )
