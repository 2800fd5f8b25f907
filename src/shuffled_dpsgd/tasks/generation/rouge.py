"""ROUGE-L (Lin, 2004) with several references, as the scripts of the E2E challenge compute it.

With the longest common subsequence of a text and each of its references, precision and recall are
each the best over the references, and F = (1 + β²)·P·R / (R + β²·P) at β = 1.2. The score of a
corpus is the mean. Words are in lower case and without punctuation.
"""

from __future__ import annotations

from collections.abc import Sequence

from shuffled_dpsgd.tasks.generation.words import lower_words

BETA = 1.2


def corpus_rouge_l(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean over all texts, from 0 to 1."""
    scores = [rouge_l(one, those) for one, those in zip(hypotheses, references, strict=True)]
    return sum(scores) / len(scores)


def rouge_l(hypothesis: str, references: Sequence[str]) -> float:
    """The score of one text.

    >>> round(rouge_l("police kill the gunman", ["police killed the gunman"]), 4)
    0.75
    """
    words = _words(hypothesis)
    precision = recall = 0.0
    for reference in references:
        others = _words(reference)
        common = longest_common(words, others)
        precision = max(precision, common / max(len(words), 1))
        recall = max(recall, common / max(len(others), 1))
    if not precision:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence.

    >>> longest_common("abcbdab", "bdcaba")
    4
    """
    # A bit for every word of `second`, zero where the table of lengths grows by one (Hyyrö, 2004).
    places: dict[str, int] = {}
    for place, word in enumerate(second):
        places[word] = places.get(word, 0) | 1 << place
    every = (1 << len(second)) - 1
    rows = every
    for word in first:
        met = rows & places.get(word, 0)
        rows = (rows + met | rows - met) & every
    return len(second) - rows.bit_count()


def _words(text: str) -> list[str]:
    return [word for word in lower_words(text) if word[0].isalnum()]
