"""Metrics that sacrebleu and nltk compute, from texts and any number of references for each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from statistics import fmean
from typing import Any

from shuffled_dpsgd.errors import MissingExtraError

NIST_ORDER = 5


def require_libraries() -> None:
    """Look for both libraries now rather than when a run has been paid for.

    Raises:
        MissingExtraError: one is not installed.
    """
    for package in ("sacrebleu", "nltk"):
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtraError(
                package, extra="hf", purpose="scores of generated texts"
            ) from error


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[float, str]:
    """sacrebleu's score from 0 to 100, and its signature, which says exactly which BLEU."""
    require_libraries()
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    most = max(len(those) for those in references)
    # One list for each number of a reference; texts with fewer references have none there.
    columns = [[those[n] if n < len(those) else None for those in references] for n in range(most)]
    score = metric.corpus_score(list(hypotheses), columns).score
    return float(score), str(metric.get_signature())


class _NoSynonyms:
    """In the place of WordNet, whose data would have to be downloaded."""

    def synsets(self, word: str) -> list[Any]:
        return []


def mean_meteor(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """nltk's METEOR with exact and stem matches alone: the best reference, the mean over texts."""
    require_libraries()
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import wordpunct_tokenize
    from nltk.translate.meteor_score import meteor_score

    stemmer, wordnet = PorterStemmer(), _NoSynonyms()
    return fmean(
        meteor_score(
            [wordpunct_tokenize(one) for one in those],
            wordpunct_tokenize(text),
            stemmer=stemmer,
            wordnet=wordnet,
        )
        for text, those in zip(hypotheses, references, strict=True)
    )


def corpus_nist(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """nltk's NIST on lower-case tokens of mteval-v13a.

    Of several references nltk takes the best one for each text and length of sequence. The script
    mteval-v13a matches with all of them together, so its scores are higher.
    """
    require_libraries()
    from nltk.translate import nist_score
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    cut = Tokenizer13a()
    texts = [cut(text.lower()).split() for text in hypotheses]
    those = [[cut(one.lower()).split() for one in each] for each in references]
    # nltk divides by the number of sequences of each length, and there may be none.
    order = min(NIST_ORDER, max(map(len, texts)))
    return float(nist_score.corpus_nist(those, texts, n=order)) if order else 0.0
