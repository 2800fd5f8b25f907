"""All metrics of generated texts against all their references, each labelled with its variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.generation.libraries import corpus_bleu, corpus_nist, mean_meteor
from shuffled_dpsgd.tasks.generation.meteor_jar import jar_meteor
from shuffled_dpsgd.tasks.generation.rouge import corpus_rouge_l

VARIANTS = {
    "bleu": "corpus BLEU, 0 to 100",
    "meteor_nltk": "METEOR 2005 by nltk, exact and stem matches alone, mean over texts, 0 to 1",
    "meteor": "METEOR 1.5, the Java program, 0 to 1",
    "rouge_l": "ROUGE-L, F at beta 1.2, best reference, 0 to 1",
    "nist_nltk": "NIST up to 5 words by nltk, the best reference of each text",
}


@dataclass(frozen=True, kw_only=True)
class GenerationScores:
    """Scores of a corpus; `meteor` is there only where the Java program was."""

    bleu: float
    bleu_signature: str
    meteor_nltk: float
    rouge_l: float
    nist_nltk: float
    meteor: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The scores, and what each of them is."""
        values = {name: getattr(self, name) for name in VARIANTS}
        found = {name: value for name, value in values.items() if value is not None}
        return found | {
            "bleu_signature": self.bleu_signature,
            "variants": {name: VARIANTS[name] for name in found},
        }


def score_texts(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    meteor_jar: Path | None = None,
) -> GenerationScores:
    """Every metric of these texts; text i is compared with all of `references[i]`.

    Raises:
        InvalidArgumentError: no texts, another number of texts, or a text without a reference.
        MissingExtraError: sacrebleu or nltk is not installed.
    """
    if not hypotheses or len(hypotheses) != len(references):
        raise InvalidArgumentError(
            "texts", expected=f"one for each of {len(references)} prompts", got=len(hypotheses)
        )
    alone = next((i for i, those in enumerate(references) if not those), None)
    if alone is not None:
        raise InvalidArgumentError(f"prompt {alone}", expected="at least one reference", got=0)
    score, signature = corpus_bleu(hypotheses, references)
    return GenerationScores(
        bleu=score,
        bleu_signature=signature,
        meteor_nltk=mean_meteor(hypotheses, references),
        rouge_l=corpus_rouge_l(hypotheses, references),
        nist_nltk=corpus_nist(hypotheses, references),
        meteor=None if meteor_jar is None else jar_meteor(hypotheses, references, meteor_jar),
    )
