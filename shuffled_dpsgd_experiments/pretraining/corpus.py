"""The public text of a pre-training run, and the guard that it is not the private set.

DART holds a copy of E2E. As public text beside a private E2E it is used without that copy; beside
a public E2E, the private DART must be trained on without it (`exclude_sources = ["e2e"]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import Continuation, read_continuations, read_texts
from shuffled_dpsgd.tasks.data.published import PUBLISHED

TextSet = Literal["e2e", "dart"]
PRIVATE_OF: dict[TextSet, TextSet] = {"dart": "e2e", "e2e": "dart"}
EXCLUDED: dict[TextSet, tuple[str, ...]] = {"dart": ("e2e",), "e2e": ()}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Records to train on and held-out ones of the public set, and plain texts from elsewhere."""

    public: TextSet
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
    public: TextSet, folder: Path, text_sets: dict[str, Path], max_records: int | None = None
) -> Corpus:
    """The public set from `folder`, and the sentences of further sets, by format and folder.

    Raises:
        InvalidArgumentError: a further set is one of the two the runs are about.
    """
    for name in text_sets:
        if PUBLISHED.get(name) is None or PUBLISHED[name].task != "text-classification":
            fitting = [n for n, facts in PUBLISHED.items() if facts.task == "text-classification"]
            raise InvalidArgumentError("--texts", expected=f"one of {fitting}", got=name)
    excluded = EXCLUDED[public]
    splits = read_continuations(
        DataConfig(
            format=public,
            path=str(folder),
            exclude_sources=excluded,
            max_train_examples=max_records,
            max_heldout_examples=max_records,
        )
    )
    texts = []
    for name, place in text_sets.items():
        data = DataConfig(
            format=name,  # type: ignore[arg-type]  # checked above
            path=str(place),
            max_train_examples=max_records,
        )
        found = read_texts(data, len(PUBLISHED[name].classes))
        texts += [text for record in found.train for text in record.texts if text.strip()]
    return Corpus(
        public=public,
        train=splits.train,
        heldout=splits.heldout["dev"],
        texts=texts,
        text_sets=tuple(text_sets),
    )
