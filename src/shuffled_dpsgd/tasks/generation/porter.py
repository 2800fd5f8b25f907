"""Porter's stemmer for English (M. F. Porter, An algorithm for suffix stripping, 1980).

A word is [C](VC)^m[V] with runs of consonants C and vowels V; m is its measure. Each step removes
or replaces the first ending of its list that the word has, if the rest meets a condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

_Rule = tuple[str, str]

_STEP_2: Sequence[_Rule] = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("abli", "able"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"),
    ("ization", "ize"), ("ation", "ate"), ("ator", "ate"), ("alism", "al"), ("iveness", "ive"),
    ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"),
)  # fmt: skip
_STEP_3: Sequence[_Rule] = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"),
    ("ful", ""), ("ness", ""),
)  # fmt: skip
_STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip


@lru_cache(maxsize=100_000)
def stem(word: str) -> str:
    """The stem of a word in lower case; words of one or two letters stay.

    >>> [stem(w) for w in ("serving", "restaurants", "rated", "cheaply")]
    ['serv', 'restaur', 'rate', 'cheapli']
    """
    if len(word) <= 2 or not word.isascii() or not word.isalpha():
        return word
    word = _plurals(word)
    word = _past_and_progressive(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _replace(word, _STEP_2, lambda rest: _measure(rest) > 0)
    word = _replace(word, _STEP_3, lambda rest: _measure(rest) > 0)
    word = _drop(word)
    return _tidy(word)


def _letters(word: str) -> str:
    """The word as c and v: y is a vowel behind a consonant, a consonant otherwise.

    >>> _letters("toy"), _letters("syzygy")
    ('cvc', 'cvcvcv')
    """
    kinds = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and kinds.endswith("c"))
        kinds += "v" if vowel else "c"
    return kinds


def _measure(word: str) -> int:
    """How often a run of vowels is followed by one of consonants.

    >>> [_measure(w) for w in ("tree", "trouble", "troubles")]
    [0, 1, 2]
    """
    return len(re.findall("v+c+", _letters(word)))


def _has_vowel(word: str) -> bool:
    return "v" in _letters(word)


def _doubled(word: str) -> bool:
    return word[-1:] == word[-2:-1] and _letters(word).endswith("c")


def _short_end(word: str) -> bool:
    """Consonant, vowel, consonant at the end, the last not w, x or y."""
    return _letters(word).endswith("cvc") and word[-1] not in "wxy"


def _plurals(word: str) -> str:
    for ending, new in (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")):
        if word.endswith(ending):
            return word.removesuffix(ending) + new
    return word


def _past_and_progressive(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for ending in ("ed", "ing"):
        rest = word.removesuffix(ending)
        if rest != word:
            return _restore(rest) if _has_vowel(rest) else word
    return word


def _restore(rest: str) -> str:
    """Give back what English drops before -ed and -ing."""
    if rest.endswith(("at", "bl", "iz")):
        return rest + "e"
    if _doubled(rest) and rest[-1] not in "lsz":
        return rest[:-1]
    if _measure(rest) == 1 and _short_end(rest):
        return rest + "e"
    return rest


def _replace(word: str, rules: Sequence[_Rule], allowed: Callable[[str], bool]) -> str:
    fitting = [(ending, new) for ending, new in rules if word.endswith(ending)]
    if not fitting:
        return word
    ending, new = max(fitting, key=lambda rule: len(rule[0]))
    rest = word.removesuffix(ending)
    return rest + new if allowed(rest) else word


def _drop(word: str) -> str:
    fitting = [ending for ending in _STEP_4 if word.endswith(ending)]
    if not fitting:
        return word
    ending = max(fitting, key=len)
    rest = word.removesuffix(ending)
    if ending == "ion" and not rest.endswith(("s", "t")):
        return word
    return rest if _measure(rest) > 1 else word


def _tidy(word: str) -> str:
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _short_end(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word
