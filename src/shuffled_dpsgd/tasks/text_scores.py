"""Metrics of generated texts against any number of references; each says which variant it is.

BLEU is sacrebleu's, METEOR and NIST are nltk's. ROUGE-L (Lin, 2004) is computed as the scripts of
the E2E challenge do; neither library has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from statistics import fmean
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, MissingExtraError, require

VARIANTS = {
    "bleu": "corpus BLEU, 0 to 100",
    "meteor_nltk": "METEOR 2005 by nltk, exact and stem matches alone, mean over texts, 0 to 1",
    "rouge_l": "ROUGE-L, F at beta 1.2, best reference, 0 to 1",
    "nist_nltk": "NIST up to 5 words by nltk, the best reference of each text",
}
_BETA = 1.2
_NIST_ORDER = 5
_WORD = re.compile(r"[^\W_]\w*")
Texts = Sequence[str]
References = Sequence[Sequence[str]]


def score_texts(texts: Texts, references: References) -> dict[str, Any]:
    """Every metric of these texts, and what each is; text i is compared with `references[i]`."""
    if not texts or len(texts) != len(references):
        raise InvalidArgumentError(
            "texts", expected=f"one for each of {len(references)} prompts", got=len(texts)
        )
    alone = next((i for i, those in enumerate(references) if not those), None)
    require(alone is None, f"prompt {alone}", "at least one reference", 0)
    bleu, signature = corpus_bleu(texts, references)
    found: dict[str, Any] = {
        "bleu": bleu,
        "meteor_nltk": mean_meteor(texts, references),
        "rouge_l": fmean(map(rouge_l, texts, references)),
        "nist_nltk": corpus_nist(texts, references),
    }
    return found | {"bleu_signature": signature, "variants": dict(VARIANTS)}


def require_libraries() -> None:
    """Look for both libraries before the run begins."""
    for package in ("sacrebleu", "nltk"):
        try:
            import_module(package)
        except ImportError as error:
            purpose = "scores of generated texts"
            raise MissingExtraError(package, extra="hf", purpose=purpose) from error


def corpus_bleu(texts: Texts, references: References) -> tuple[float, str]:
    """sacrebleu's score from 0 to 100, and its signature, which says exactly which BLEU."""
    require_libraries()
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    most = max(len(those) for those in references)
    # One list for each number of a reference; texts with fewer references have none there.
    columns = [[those[n] if n < len(those) else None for those in references] for n in range(most)]
    score = metric.corpus_score(list(texts), columns).score
    return float(score), str(metric.get_signature())


class _NoSynonyms:
    """Used instead of WordNet, whose data would have to be downloaded."""

    def synsets(self, word: str) -> list[Any]:
        return []


def mean_meteor(texts: Texts, references: References) -> float:
    """nltk's METEOR with exact and stem matches alone: the best reference, the mean over texts."""
    require_libraries()
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import wordpunct_tokenize as cut
    from nltk.translate.meteor_score import meteor_score

    stemmer, wordnet = PorterStemmer(), _NoSynonyms()
    return fmean(
        meteor_score([*map(cut, those)], cut(text), stemmer=stemmer, wordnet=wordnet)
        for text, those in zip(texts, references, strict=True)
    )


def corpus_nist(texts: Texts, references: References) -> float:
    """nltk's NIST on lower-case tokens of mteval-v13a.

    Of several references nltk takes the best one for each text and length of sequence. The script
    mteval-v13a matches with all of them together, so its scores are higher.
    """
    require_libraries()
    from nltk.translate import nist_score
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    cut = Tokenizer13a()
    words = [cut(text.lower()).split() for text in texts]
    those = [[cut(one.lower()).split() for one in each] for each in references]
    # nltk divides by the number of sequences of each length, and there may be none.
    order = min(_NIST_ORDER, max(map(len, words)))
    return float(nist_score.corpus_nist(those, words, n=order)) if order else 0.0


def rouge_l(text: str, references: Sequence[str]) -> float:
    """ROUGE-L of one text, on words in lower case and without punctuation.

    With the longest common subsequence of the text and each of its references, precision and recall
    are each the best over the references, and F = (1 + β²)·P·R / (R + β²·P) at β = 1.2.

    >>> round(rouge_l("police kill the gunman", ["police killed the gunman"]), 4)
    0.75
    """
    words = _WORD.findall(text.lower())
    precision = recall = 0.0
    for others in (_WORD.findall(reference.lower()) for reference in references):
        lengths = [0] * (len(others) + 1)  # Of the longest common subsequences with its beginnings.
        for word in words:
            before = 0
            for place, other in enumerate(others, start=1):
                longer = before + 1 if word == other else max(lengths[place], lengths[place - 1])
                before, lengths[place] = lengths[place], longer
        precision = max(precision, lengths[-1] / max(len(words), 1))
        recall = max(recall, lengths[-1] / max(len(others), 1))
    if not precision:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)
