"""ROUGE-L (Lin, 2004) with several references, as the scripts of the E2E challenge compute it.

With the longest common subsequence of a text and each of its references, precision and recall are
each the best over the references, and F = (1 + β²)·P·R / (R + β²·P) at β = 1.2. The score of a
corpus is the mean. Words are in lower case and without punctuation. Neither sacrebleu nor nltk has
it; pycocoevalcap does, with 100 MB of other programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

BETA = 1.2
_WORD = re.compile(r"[^\W_]\w*")


def corpus_rouge_l(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean over all texts, from 0 to 1."""
    return fmean(rouge_l(one, those) for one, those in zip(hypotheses, references, strict=True))


def rouge_l(hypothesis: str, references: Sequence[str]) -> float:
    """The score of one text.

    >>> round(rouge_l("police kill the gunman", ["police killed the gunman"]), 4)
    0.75
    """
    words = _WORD.findall(hypothesis.lower())
    precision = recall = 0.0
    for reference in references:
        others = _WORD.findall(reference.lower())
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
    lengths = [0] * (len(second) + 1)
    for one in first:
        before = 0
        for place, other in enumerate(second, start=1):
            longer = before + 1 if one == other else max(lengths[place], lengths[place - 1])
            before, lengths[place] = lengths[place], longer
    return lengths[-1]
