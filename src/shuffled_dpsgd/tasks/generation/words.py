"""How metrics cut a text into words: each metric names the way it uses."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+|[^\w\s]")
_ENTITIES = {"&quot;": '"', "&amp;": "&", "&lt;": "<", "&gt;": ">"}
_MTEVAL = (
    # Symbols stand alone; full stops and commas do unless digits are on that side; so does a
    # dash behind a digit.
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def lower_words(text: str) -> list[str]:
    """Words and punctuation marks in lower case.

    >>> lower_words("The Mill's £30, OK?")
    ['the', 'mill', "'", 's', '£', '30', ',', 'ok', '?']
    """
    return _WORD.findall(text.lower())


def mteval_words(text: str, *, lower: bool = True) -> list[str]:
    """As the NIST script mteval-v13a does, in lower case or with the text's own.

    >>> mteval_words("It costs 3.50, or less.")
    ['it', 'costs', '3.50', ',', 'or', 'less', '.']
    """
    text = (
        (text.lower() if lower else text)
        .replace("<skipped>", "")
        .replace("-\n", "")
        .replace("\n", " ")
    )
    for name, sign in _ENTITIES.items():
        text = text.replace(name, sign)
    text = f" {text} "
    for pattern, spaced in _MTEVAL:
        text = pattern.sub(spaced, text)
    return text.split()
