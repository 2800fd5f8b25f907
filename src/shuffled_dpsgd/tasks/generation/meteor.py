"""METEOR with exact and stem matches (Banerjee and Lavie, 2005): no synonyms, no paraphrases.

Words match if their stems are equal. Of the alignments with the most matches the one with the
fewest chunks counts; a chunk is a run of words that are adjacent and in the same order in both
texts. With precision P and recall R over m matches in ch chunks,

    F = 10·P·R / (R + 9·P),   score = F · (1 - 0.5·(ch / m)³).

Of several references the best one counts. The score of a corpus is that formula on the sums over
its texts, as the METEOR program has it; it is not the mean of their scores. Scores are lower than
those of METEOR 1.5, which also matches synonyms and paraphrases and has other parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shuffled_dpsgd.tasks.generation.porter import stem
from shuffled_dpsgd.tasks.generation.words import lower_words

BEAM = 64


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What the score of a text, or of a whole corpus, depends on."""

    matches: int = 0
    chunks: int = 0
    hypothesis_length: int = 0
    reference_length: int = 0

    def __add__(self, other: Alignment) -> Alignment:
        return Alignment(
            matches=self.matches + other.matches,
            chunks=self.chunks + other.chunks,
            hypothesis_length=self.hypothesis_length + other.hypothesis_length,
            reference_length=self.reference_length + other.reference_length,
        )

    @property
    def score(self) -> float:
        """From 0 to 1."""
        if not self.matches:
            return 0.0
        precision = self.matches / self.hypothesis_length
        recall = self.matches / self.reference_length
        mean = 10 * precision * recall / (recall + 9 * precision)
        return mean * (1 - 0.5 * (self.chunks / self.matches) ** 3)


def corpus_meteor(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The score of a corpus, from 0 to 1."""
    total = Alignment()
    for hypothesis, those in zip(hypotheses, references, strict=True):
        total += best_alignment(stems_of(hypothesis), [stems_of(one) for one in those])
    return total.score


def stems_of(text: str) -> list[str]:
    """The stems of a text's words, in lower case; punctuation marks are words."""
    return [stem(word) for word in lower_words(text)]


def best_alignment(hypothesis: Sequence[str], references: Sequence[Sequence[str]]) -> Alignment:
    """The alignment of the best score, the first of equals.

    In one chunk a reference would score most. Those whose most is below what another reaches are
    not aligned, which takes long.
    """
    most = [_with_chunks(1, hypothesis, reference).score for reference in references]
    best, at = Alignment(), len(references)
    for place in sorted(range(len(references)), key=lambda place: -most[place]):
        if most[place] < best.score:
            break
        found = align(hypothesis, references[place])
        if at == len(references) or (found.score, -place) > (best.score, -at):
            best, at = found, place
    return best


def _with_chunks(chunks: int, hypothesis: Sequence[str], reference: Sequence[str]) -> Alignment:
    """The most matches there can be, in so many chunks."""
    return Alignment(
        matches=(Counter(hypothesis) & Counter(reference)).total(),
        chunks=chunks,
        hypothesis_length=len(hypothesis),
        reference_length=len(reference),
    )


def align(hypothesis: Sequence[str], reference: Sequence[str]) -> Alignment:
    """Most matches, then fewest chunks; exact up to `BEAM` open alternatives at a time."""
    places: dict[str, list[int]] = {}
    for place, word in enumerate(reference):
        places.setdefault(word, []).append(place)
    found = _with_chunks(0, hypothesis, reference)
    return replace(found, chunks=_fewest_chunks(hypothesis, places)) if found.matches else found


def _fewest_chunks(hypothesis: Sequence[str], places: dict[str, list[int]]) -> int:
    # A state: which places of the reference are taken (as bits), and that of the word before.
    states: dict[tuple[int, int], int] = {(0, -2): 0}
    left = Counter(hypothesis)
    for word in hypothesis:
        left[word] -= 1
        grown: dict[tuple[int, int], int] = {}
        for (taken, before), chunks in states.items():
            free = [place for place in places.get(word, ()) if not taken >> place & 1]
            options = [(taken | 1 << p, p, chunks + (p != before + 1)) for p in free]
            if len(free) <= left[word]:
                # Enough words like this one follow: leaving it out costs no match.
                options.append((taken, -2, chunks))
            for now, last, cost in options:
                key = (now, last)
                grown[key] = min(cost, grown.get(key, cost))
        kept = sorted(grown.items(), key=lambda item: item[1])[:BEAM]
        states = dict(kept)
    return min(states.values())
