"""The NIST score (Doddington, 2002) up to five words, as the script mteval-v13a computes it.

A sequence of words that a text shares with a reference counts by its information: the binary
logarithm of how often its beginning occurs in the references over how often it occurs itself.
For each length the information found is divided by the number of sequences in the texts, and the
five results are added. Texts shorter than the mean reference are punished: by one half at two
thirds of the length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shuffled_dpsgd.tasks.generation.words import mteval_words

ORDER = 5
_PENALTY = math.log(0.5) / math.log(1.5) ** 2
Sequences = Counter[tuple[str, ...]]


def corpus_nist(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The score of a corpus; 0 at least, without an upper limit."""
    texts = [mteval_words(text) for text in hypotheses]
    those = [[mteval_words(text) for text in one] for one in references]
    weight = information([words for one in those for words in one])
    found, count = [0.0] * ORDER, [0] * ORDER
    for words, ones in zip(texts, those, strict=True):
        most: Sequences = Counter()
        for one in ones:
            most |= sequences(one)
        for sequence, times in sequences(words).items():
            found[len(sequence) - 1] += min(times, most[sequence]) * weight.get(sequence, 0.0)
            count[len(sequence) - 1] += times
    total = sum(f / c for f, c in zip(found, count, strict=True) if c)
    mean_length = sum(sum(map(len, ones)) / len(ones) for ones in those)
    return total * _brevity(sum(map(len, texts)), mean_length)


def information(references: Sequence[Sequence[str]]) -> dict[tuple[str, ...], float]:
    """How many bits each sequence of the references is worth.

    >>> sorted(information([["a", "b"], ["a", "c"]]).items())[:2]
    [(('a',), 1.0), (('a', 'b'), 1.0)]
    """
    counts: Sequences = Counter()
    for words in references:
        counts.update(sequences(words))
    counts[()] = sum(map(len, references))
    return {s: math.log2(counts[s[:-1]] / times) for s, times in counts.items() if s}


def sequences(words: Sequence[str], order: int = ORDER) -> Sequences:
    """Every run of one to `order` words, with how often it occurs."""
    return Counter(
        tuple(words[start : start + size])
        for size in range(1, order + 1)
        for start in range(len(words) - size + 1)
    )


def _brevity(length: int, reference_length: float) -> float:
    if not length or not reference_length:
        return 0.0
    return math.exp(_PENALTY * math.log(min(length / reference_length, 1.0)) ** 2)
