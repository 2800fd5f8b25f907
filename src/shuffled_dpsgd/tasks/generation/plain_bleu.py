"""Corpus BLEU in plain Python, for machines without sacrebleu; the tests hold it against that.

The same as sacrebleu's default: tokens of mteval-v13a with their case, up to four words, the
reference of the closest length (the shorter of two), and an n-gram length without any match counts
as half a match, the next as a quarter, and so on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shuffled_dpsgd.tasks.generation.nist import sequences
from shuffled_dpsgd.tasks.generation.words import mteval_words

ORDER = 4
SIGNATURE = "plain Python|case:mixed|eff:no|tok:13a|smooth:exp|checked against sacrebleu"


def plain_bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The score from 0 to 100."""
    matched, total = [0] * ORDER, [0] * ORDER
    length = reference_length = 0
    for text, those in zip(hypotheses, references, strict=True):
        words = mteval_words(text, lower=False)
        others = [mteval_words(one, lower=False) for one in those]
        length += len(words)
        reference_length += min(map(len, others), key=lambda n: (abs(n - len(words)), n))
        most: Counter[tuple[str, ...]] = Counter()
        for other in others:
            most |= sequences(other, ORDER)
        for sequence, times in sequences(words, ORDER).items():
            matched[len(sequence) - 1] += min(times, most[sequence])
            total[len(sequence) - 1] += times
    if not all(total) or not any(matched):
        return 0.0
    brevity = 1.0 if length >= reference_length else math.exp(1 - reference_length / length)
    return 100 * brevity * math.exp(sum(map(math.log, _precisions(matched, total))) / ORDER)


def _precisions(matched: Sequence[int], total: Sequence[int]) -> list[float]:
    found, share = [], 1.0
    for hits, count in zip(matched, total, strict=True):
        if not hits:
            share /= 2
        found.append((hits or share) / count)
    return found
