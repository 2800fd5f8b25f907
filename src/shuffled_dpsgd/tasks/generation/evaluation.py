"""Generation on a held-out split: continue every prompt, compare with all its references."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import drawn_part, read_references, scored_split
from shuffled_dpsgd.tasks.data.tables import Row, read_table
from shuffled_dpsgd.tasks.generation.config import GenerationConfig
from shuffled_dpsgd.tasks.generation.decoding import (
    continue_prompts,
    prompt_ids,
    room_for_prompts,
)
from shuffled_dpsgd.tasks.generation.scores import score_texts
from shuffled_dpsgd.tasks.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A prompt, what the model made of it, and what people wrote."""

    prompt: str
    text: str
    references: tuple[str, ...]


def generate_split(
    model: Any, tokenizer: Tokenizer, data: DataConfig, settings: GenerationConfig
) -> list[Generated]:
    """Continue every prompt of the held-out split asked for, or of the one a run is scored on."""
    asked = read_references(data, settings.split)
    asked = [asked[index] for index in drawn_part(len(asked), settings.max_prompts)]
    texts = continue_prompts(model, tokenizer, [one.prompt for one in asked], settings.decoding)
    return [
        Generated(prompt=one.prompt, text=text, references=one.references)
        for one, text in zip(asked, texts, strict=True)
    ]


def score_generated(
    generated: Sequence[Generated], *, meteor_jar: Path | None = None
) -> dict[str, Any]:
    """Every metric, and how much it was computed from."""
    scores = score_texts(
        [one.text for one in generated],
        [one.references for one in generated],
        meteor_jar=meteor_jar,
    )
    return {
        **scores.to_json(),
        "num_prompts": len(generated),
        "num_references": sum(len(one.references) for one in generated),
        "num_empty": sum(not one.text for one in generated),
    }


def evaluate_generation(
    model: Any,
    tokenizer: Tokenizer,
    data: DataConfig,
    settings: GenerationConfig,
    *,
    meteor_jar: Path | None = None,
    texts_to: Path | None = None,
) -> dict[str, Any]:
    """`generate_split` and `score_generated`; the texts are kept in `texts_to` before scoring."""
    data.check_split(settings.split)
    generated = generate_split(model, tokenizer, data, settings)
    if texts_to is not None:
        write_generated(texts_to, generated)
    decoding = settings.decoding
    room = room_for_prompts(model, decoding)
    cut = sum(
        prompt_ids(one.prompt, tokenizer, room) != prompt_ids(one.prompt, tokenizer, None)
        for one in generated
    )
    return {
        "split": settings.split or scored_split(data),
        **score_generated(generated, meteor_jar=meteor_jar),
        "num_prompts_cut": cut,
        "decoding": decoding.to_json(),
    }


def write_generated(path: Path, generated: Sequence[Generated]) -> None:
    """One JSON object a line: prompt, text, references."""
    rows = [
        {"prompt": one.prompt, "text": one.text, "references": list(one.references)}
        for one in generated
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(lines, encoding="utf-8")


def read_generated(path: Path) -> list[Generated]:
    """What `write_generated` wrote; texts may come from any other program as well."""
    if not path.is_file():
        raise InvalidArgumentError("--texts", expected="a .jsonl file", got=str(path))
    return [_generated(row) for row in read_table(path, ("prompt", "text", "references"))]


def _generated(row: Row) -> Generated:
    references = row.cells["references"]
    if not isinstance(references, list) or not all(isinstance(one, str) for one in references):
        raise InvalidArgumentError(
            row.where, expected="a list of texts in 'references'", got=type(references).__name__
        )
    return Generated(prompt=row.text("prompt"), text=row.text("text"), references=tuple(references))
