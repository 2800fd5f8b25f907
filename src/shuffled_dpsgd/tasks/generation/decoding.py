"""Continuing prompts with a language model: greedily or by beam search, many at once.

Prompts are padded on the left, so that every continuation begins at the same place; padding is
masked and positions are counted without it. transformers' `generate` does the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.ranges import check_range
from shuffled_dpsgd.tasks.tokenizers import Tokenizer

MARK = " ||"
"""Stands between prompt and target, in training and here."""
ROWS = 256
"""Sequences that are continued at once, where more would hardly be faster."""
GPU_ROWS = 1024
"""The same on a GPU, if a tenth of its free memory holds what attention remembers of them."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a text is searched for: one beam is greedy.

    A sequence's score is its log-probability over its length to the power `length_penalty`; no
    sequence of `no_repeat_ngram_size` tokens occurs twice, unless that is 0.
    """

    max_new_tokens: int = 64
    num_beams: int = 1
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        check_range("max_new_tokens", self.max_new_tokens, 1)
        check_range("num_beams", self.num_beams, 1)
        check_range("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def prompt_ids(prompt: str, tokenizer: Tokenizer, room: int | None) -> list[int]:
    """A prompt and the mark behind it, as training has them, in at most `room` ids."""
    ids = tokenizer.encode_plain(f"{prompt}{MARK}")
    return ids if room is None else cut_prompt(ids, tokenizer.encode_plain(MARK), room)


def cut_prompt(ids: list[int], mark: list[int], room: int) -> list[int]:
    """Of ids that are too many the last before the mark are left out; one at least is kept.

    >>> cut_prompt([1, 2, 3, 9, 9], [9, 9], 4), cut_prompt([1, 2], [9, 9], -3)
    ([1, 2, 9, 9], [9])
    """
    if len(ids) <= room:
        return ids
    return [*ids[: max(room - len(mark), 0)], *mark][: max(room, 1)]


def room_for_prompts(model: Any, decoding: Decoding) -> int | None:
    """How many tokens a prompt may have beside its continuation; None: any number."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    if positions <= decoding.max_new_tokens:
        raise InvalidArgumentError(
            "max_new_tokens",
            expected=f"fewer than the model's {positions} positions",
            got=decoding.max_new_tokens,
        )
    return int(positions) - decoding.max_new_tokens


@torch.no_grad()
def continue_prompts(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[str], decoding: Decoding
) -> list[str]:
    """The text that follows each prompt, in the order of the prompts."""
    room = room_for_prompts(model, decoding)
    rows = [prompt_ids(prompt, tokenizer, room) for prompt in prompts]
    # Like lengths together, the longest first: what does not fit into memory fails at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    longest = max(map(len, rows), default=0) + decoding.max_new_tokens
    size = max(rows_at_once(model, longest) // decoding.num_beams, 1)
    texts = [""] * len(rows)
    was_training = model.training
    model.eval()
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        found = continue_ids(model, tokenizer, [rows[i] for i in chosen], decoding)
        for i, ids in zip(chosen, found, strict=True):
            texts[i] = tokenizer.decode(ids).strip()
    model.train(was_training)
    return texts


def rows_at_once(model: Any, length: int) -> int:
    """How many sequences of `length` tokens to continue at once: a step takes as long for many."""
    weight = next(model.parameters())
    layers = getattr(model.config, "num_hidden_layers", None)
    width = getattr(model.config, "hidden_size", None)
    if weight.device.type != "cuda" or layers is None or width is None:
        return ROWS
    free, _ = torch.cuda.mem_get_info(weight.device)
    # Keys and values; models that share them between heads need less.
    each = 2 * layers * width * length * weight.element_size()
    return min(max(free // (10 * each), ROWS), GPU_ROWS)


def continue_ids(
    model: Any, tokenizer: Tokenizer, rows: Sequence[list[int]], decoding: Decoding
) -> list[list[int]]:
    """The new ids of each row, without the end."""
    from transformers import GenerationConfig

    longest = max(len(row) for row in rows)
    missing = [longest - len(row) for row in rows]
    filled = [[tokenizer.pad_id] * n + row for n, row in zip(missing, rows, strict=True)]
    mask = [[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)]
    device = next(model.parameters()).device
    settings = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.end_id,
        early_stopping=False,
        **decoding.to_json(),
    )
    found = model.generate(
        torch.tensor(filled, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=settings,
    )
    return [_until(row, tokenizer.end_id) for row in found[:, longest:].tolist()]


@torch.no_grad()
def continue_slowly(
    model: Any, tokenizer: Tokenizer, row: Sequence[int], max_new_tokens: int
) -> list[int]:
    """The likeliest token, one after the other, without padding or cache: the oracle of tests."""
    ids = list(row)
    device = next(model.parameters()).device
    for _ in range(max_new_tokens):
        best = int(model(input_ids=torch.tensor([ids], device=device)).logits[0, -1].argmax())
        if best == tokenizer.end_id:
            break
        ids.append(best)
    return ids[len(row) :]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids
