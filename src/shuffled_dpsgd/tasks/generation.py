"""Continues prompts with a language model, and scores the texts of a held-out split.

Prompts are padded on the left and the padding is masked. transformers' `generate` decodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import DataConfig, GenerationConfig
from shuffled_dpsgd.tasks.data.loading import drawn_part, read_references, scored_split
from shuffled_dpsgd.tasks.text_scores import score_texts
from shuffled_dpsgd.tasks.tokens import Tokenizer

MARK = " ||"
"""Stands between prompt and target, in training and here."""
_ROWS = 256
"""Sequences that are continued at once."""


class Generated(NamedTuple):
    """A prompt, the model's text, and the references."""

    prompt: str
    text: str
    references: tuple[str, ...]


def prompt_ids(prompt: str, tokenizer: Tokenizer, room: int | None = None) -> list[int]:
    """A prompt and the mark behind it, as training has them, in at most `room` ids."""
    ids = tokenizer.encode_plain([f"{prompt}{MARK}"])[0]
    return ids if room is None else cut_prompt(ids, tokenizer.encode_plain([MARK])[0], room)


def cut_prompt(ids: list[int], mark: list[int], room: int) -> list[int]:
    """Cut ids to `room` by leaving out the last ones before the mark; at least one is kept.

    >>> cut_prompt([1, 2, 3, 9, 9], [9, 9], 4), cut_prompt([1, 2], [9, 9], -3)
    ([1, 2, 9, 9], [9])
    """
    if len(ids) <= room:
        return ids
    return [*ids[: max(room - len(mark), 0)], *mark][: max(room, 1)]


def room_for_prompts(model: Any, settings: GenerationConfig) -> int | None:
    """How many tokens a prompt may have; None if there is no limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    if positions <= settings.max_new_tokens:
        raise InvalidArgumentError(
            "max_new_tokens",
            expected=f"fewer than the model's {positions} positions",
            got=settings.max_new_tokens,
        )
    return int(positions) - settings.max_new_tokens


def continue_prompts(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[str], settings: GenerationConfig
) -> list[str]:
    """The text that follows each prompt, in the order of the prompts."""
    room = room_for_prompts(model, settings)
    rows = [prompt_ids(prompt, tokenizer, room) for prompt in prompts]
    return continue_rows(model, tokenizer, rows, settings)


@torch.no_grad()
def continue_rows(
    model: Any,
    tokenizer: Tokenizer,
    rows: Sequence[list[int]],
    settings: GenerationConfig,
    end: int | None = None,
) -> list[str]:
    """The text that follows each row of ids, up to `end`, the tokenizer's own by default."""
    # Sorted by length to save padding, the longest first so that a lack of memory shows at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    size = max(_ROWS // settings.num_beams, 1)
    texts = [""] * len(rows)
    was_training = model.training
    model.eval()
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        found = continue_ids(model, tokenizer, [rows[i] for i in chosen], settings, end)
        for i, ids in zip(chosen, found, strict=True):
            texts[i] = tokenizer.decode(ids).strip()
    model.train(was_training)
    return texts


def continue_ids(
    model: Any,
    tokenizer: Tokenizer,
    rows: Sequence[list[int]],
    settings: GenerationConfig,
    end: int | None = None,
) -> list[list[int]]:
    """The new ids of each row, without the end."""
    from transformers import GenerationConfig as Search

    longest, end = max(map(len, rows)), tokenizer.end_id if end is None else end
    missing = [longest - len(row) for row in rows]
    filled = [[tokenizer.pad_id] * n + row for n, row in zip(missing, rows, strict=True)]
    mask = [[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)]
    device = next(model.parameters()).device
    search = Search(
        do_sample=False,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=end,
        early_stopping=False,
        **settings.search,
    )
    found = model.generate(
        torch.tensor(filled, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=search,
    )
    new = found[:, longest:].tolist()
    return [ids[: ids.index(end)] if end in ids else ids for ids in new]


def generate_split(
    model: Any, tokenizer: Tokenizer, data: DataConfig, settings: GenerationConfig
) -> list[Generated]:
    """Continue every prompt of the held-out split asked for, or of the one a run is scored on."""
    asked = read_references(data, settings.split)
    asked = [asked[index] for index in drawn_part(len(asked), settings.max_prompts)]
    texts = continue_prompts(model, tokenizer, [one.prompt for one in asked], settings)
    return [
        Generated(one.prompt, text, one.references) for one, text in zip(asked, texts, strict=True)
    ]


def score_generated(generated: Sequence[Generated]) -> dict[str, Any]:
    """Every metric, and how much it was computed from."""
    texts, references = [one.text for one in generated], [one.references for one in generated]
    return {
        **score_texts(texts, references),
        "num_prompts": len(generated),
        "num_references": sum(map(len, references)),
        "num_empty": sum(not text for text in texts),
    }


def evaluate_generation(
    model: Any,
    tokenizer: Tokenizer,
    data: DataConfig,
    settings: GenerationConfig,
    *,
    texts_to: Path | None = None,
) -> dict[str, Any]:
    """`generate_split` and `score_generated`; the texts are kept in `texts_to` before scoring."""
    data.check_split(settings.split)
    generated = generate_split(model, tokenizer, data, settings)
    if texts_to is not None:
        rows = (json.dumps(one._asdict(), ensure_ascii=False) + "\n" for one in generated)
        texts_to.write_text("".join(rows), encoding="utf-8")
    room = room_for_prompts(model, settings)
    whole = [len(prompt_ids(one.prompt, tokenizer)) for one in generated]
    return {
        "split": settings.split or scored_split(data),
        **score_generated(generated),
        "num_prompts_cut": 0 if room is None else sum(length > room for length in whole),
        "decoding": settings.search,
    }
