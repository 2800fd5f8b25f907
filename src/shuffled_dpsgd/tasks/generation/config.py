"""The `[generation]` section of a run: how its language model's texts are scored at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shuffled_dpsgd.tasks.generation.decoding import Decoding
from shuffled_dpsgd.tasks.ranges import check_range


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Decoding):
    """How texts are searched for, on which held-out split, and for how many of its prompts.

    `bleu = "plain"` stands in files whose cells are committed. It is sacrebleu's score as well.
    """

    split: str | None = None
    max_prompts: int | None = None
    bleu: Literal["sacrebleu", "plain"] = "sacrebleu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_prompts", self.max_prompts, 1)

    @property
    def decoding(self) -> Decoding:
        """The search alone."""
        return Decoding(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
        )
