"""Text tasks: sequence classification, language models that continue prompts, and chats."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.integrations.per_sample_loss import (
    IGNORED_LABEL,
    next_token_losses,
    unwrapped,
)
from shuffled_dpsgd.tasks.chat import encode_chats
from shuffled_dpsgd.tasks.classification import (
    classification_task,
    heldout_batches,
    name_classes,
    stated_classes,
)
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.data.loading import (
    Continuation,
    LabelledText,
    Splits,
    check_sizes,
    read_chats,
    read_continuations,
    read_texts,
    require_task,
)
from shuffled_dpsgd.tasks.generation import MARK, cut_prompt, evaluate_generation
from shuffled_dpsgd.tasks.models import prepare_model
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd.tasks.text_scores import require_libraries
from shuffled_dpsgd.tasks.tokens import (
    Record,
    TokenCollate,
    Tokenizer,
    TokenRecords,
    class_labels,
    continuation_labels,
    given_labels,
    ids_of,
    load_tokenizer,
)
from shuffled_dpsgd.training.units import Units

_LARGEST_EXPONENT = 700.0


def build_classification(config: RunConfig) -> Task:
    """Fine-tune a sequence classifier."""
    data = config.data
    require_task(data, "text-classification")
    num_labels = stated_classes(data)
    unit = config.privacy.unit if config.privacy.records_per_unit else None
    splits = read_texts(data, num_labels, unit)
    check_sizes(splits, batch=config.training.expected_batch_size)

    def fresh_model(seed: int) -> nn.Module:
        model = prepare_model(config.model, head="sequence", num_labels=num_labels, seed=seed)
        name_classes(model, data, num_labels)
        return model

    model = fresh_model(config.init_seed)
    tokenizer = load_tokenizer(config.model.name)
    encode = partial(
        encode_labelled,
        tokenizer=tokenizer,
        max_length=data.max_length,
        typed=uses_token_types(model),
    )
    return classification_task(
        "text-classification",
        model,
        _encoded(config, model, splits, encode),
        fresh_model=fresh_model,
        collate=TokenCollate(pad_id=tokenizer.pad_id, labels=class_labels),
        save_assets=tokenizer.save,
        units=None if unit is None else Units(each.unit for each in splits.train),
    )


def build_causal_lm(config: RunConfig) -> Task:
    """Fine-tune a language model to continue prompts; only the continuation is scored."""
    data, wanted = config.data, config.generation
    require_task(data, "causal-lm")
    splits = read_continuations(data)
    if wanted is not None:
        data.check_split(wanted.split)
        require_libraries()

    return _language_task(config, splits, encode_continuations, continuation_labels)


def build_sft(config: RunConfig) -> Task:
    """Fine-tune a language model on chats, or on prompts with completions; answers are scored."""
    require_task(config.data, "sft")
    return _language_task(config, read_chats(config.data), encode_chats, given_labels)


def _language_task(
    config: RunConfig,
    splits: Splits[Any],
    encode: Callable[[Any, Tokenizer, int], list[Record]],
    labels: Callable[[Sequence[Record], int], torch.Tensor],
) -> Task:
    check_sizes(splits, batch=config.training.expected_batch_size)
    wanted = config.generation

    def fresh_model(seed: int) -> nn.Module:
        return prepare_model(config.model, head="causal-lm", seed=seed)

    model = fresh_model(config.init_seed)
    tokenizer = load_tokenizer(config.model.name, marked=False)
    encoded = _encoded(
        config, model, splits, lambda part: encode(part, tokenizer, config.data.max_length)
    )
    collate = TokenCollate(pad_id=tokenizer.pad_id, labels=labels)
    return Task(
        name=config.task,
        model=model,
        train_data=encoded.train,
        losses=lambda model, batch: next_token_losses(model(**batch[0]).logits, batch[1]),
        evaluations={
            split: partial(evaluate_perplexity, heldout=heldout, collate=collate)
            for split, heldout in encoded.heldout.items()
        },
        heldout_data=next(iter(encoded.heldout.values())),
        score_name="perplexity",
        fresh_model=fresh_model,
        collate=collate,
        save_assets=tokenizer.save,
        evaluate_texts=None
        if wanted is None
        else lambda trained: evaluate_generation(trained, tokenizer, config.data, wanted),
    )


def uses_token_types(model: nn.Module) -> bool:
    """Whether a model takes `token_type_ids` (BERT does, RoBERTa does not)."""
    inner = unwrapped(model)
    known = getattr(getattr(inner, "config", None), "type_vocab_size", 0)
    return known > 1 and "token_type_ids" in inspect.signature(inner.forward).parameters


def encode_labelled(
    examples: Sequence[LabelledText], tokenizer: Tokenizer, max_length: int, typed: bool = False
) -> list[Record]:
    """Token ids and class of each example; `typed` pairs say which text each token belongs to."""
    texts = [example.texts for example in examples]
    rows = tokenizer.encode(texts, max_length=max_length, typed=typed)
    return [(ids, example.label) for ids, example in zip(rows, examples, strict=True)]


def encode_continuations(
    examples: Sequence[Continuation], tokenizer: Tokenizer, max_length: int
) -> list[Record]:
    """Ids of prompt, mark, target and end; with the number of ids before the target."""
    encoded: list[Record] = []
    (mark,) = tokenizer.encode_plain([MARK])
    prompts = tokenizer.encode_plain([f"{example.prompt}{MARK}" for example in examples])
    targets = tokenizer.encode_plain([f" {example.target}" for example in examples])
    for prompt, target in zip(prompts, targets, strict=True):
        # Cut the prompt rather than the target: without a target token there is nothing to learn.
        kept = cut_prompt(prompt, mark, max_length - len(target) - 1)
        ids = [*kept, *target, tokenizer.end_id][:max_length]
        encoded.append((ids, len(kept)))
    return encoded


def _encoded(
    config: RunConfig,
    model: nn.Module,
    splits: Splits[Any],
    encode: Callable[[Any], list[Record]],
) -> Splits[TokenRecords]:
    """Token records; refuses texts the model has no positions or no vocabulary for."""
    heldout = {name: TokenRecords(encode(part)) for name, part in splits.heldout.items()}
    train = TokenRecords(encode(splits.train))
    named = {"training": train, **{f"{name} held-out": part for name, part in heldout.items()}}
    longest = largest = 0
    for name, part in named.items():
        for number, ids in enumerate(map(ids_of, part)):
            require(ids, f"{name} record {number}", "at least one token", "an empty text")
            longest, largest = max(longest, len(ids)), max(largest, *ids)
    known: Any = getattr(model, "config", None)
    positions = getattr(known, "max_position_embeddings", None)
    if positions is not None and "roberta" in getattr(known, "model_type", ""):
        positions -= 2  # Its position ids begin behind that of the padding.
    if positions is not None and longest > positions:
        raise InvalidArgumentError(
            "data.max_length",
            expected=f"at most the {positions} positions of {config.model.name}",
            got=config.data.max_length,
        )
    size = getattr(known, "vocab_size", None)
    if size is not None and largest >= size:
        raise InvalidArgumentError(
            "model.name",
            expected=f"a tokenizer whose tokens are below {size}, as the model's embedding has",
            got=largest,
            remedy="save the model with the tokenizer it was trained with",
        )
    return Splits(train=train, heldout=heldout)


@torch.no_grad()
def evaluate_perplexity(
    model: nn.Module, heldout: Sequence[Any], collate: Callable[[list[Any]], Any]
) -> Evaluation:
    """Mean loss per example, and perplexity per held-out target token."""
    sample_loss = token_loss = 0.0
    tokens = 0
    for inputs, labels in heldout_batches(model, heldout, collate):
        losses = next_token_losses(model(**inputs).logits, labels)
        counts = (labels[:, 1:] != IGNORED_LABEL).sum(dim=1)
        sample_loss += losses.sum().item()
        token_loss += (losses * counts).sum().item()
        tokens += int(counts.sum())
    mean = token_loss / max(tokens, 1)
    # A model that diverged: the overflow must not end the run.
    perplexity = math.inf if mean > _LARGEST_EXPONENT else math.exp(mean)
    return Evaluation(loss=sample_loss / max(len(heldout), 1), score=perplexity)
