"""The METEOR 1.5 program itself, where Java and its jar are: synonyms and paraphrases as well.

It is spoken to over its standard input: a line `SCORE ||| references ||| text` gives a line of
statistics, a line `EVAL ||| statistics ||| …` the scores of all texts and of the corpus.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd.errors import InvalidArgumentError

_SEPARATOR = " ||| "


def jar_meteor(hypotheses: Sequence[str], references: Sequence[Sequence[str]], jar: Path) -> float:
    """The score of a corpus, from 0 to 1.

    Raises:
        InvalidArgumentError: no Java, no jar, or it does not answer as METEOR does.
    """
    command = [find_java(jar), "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    lines = [
        _SEPARATOR.join(["SCORE", *map(_plain, those), _plain(text)])
        for text, those in zip(hypotheses, references, strict=True)
    ]
    statistics = _ask(command, lines, len(lines))
    answer = _ask(command, [_SEPARATOR.join(["EVAL", *statistics])], len(lines) + 1)
    try:
        return float(answer[-1])
    except ValueError as error:
        raise _strange(command, answer[-1]) from error


def find_java(jar: Path) -> str:
    """The program that runs `jar`, which must be there.

    Raises:
        InvalidArgumentError: no Java, or no jar.
    """
    java = shutil.which("java")
    if java is None:
        raise InvalidArgumentError("--meteor-jar", expected="Java on the path", got="none")
    if not jar.is_file():
        raise InvalidArgumentError("--meteor-jar", expected="meteor-1.5.jar", got=str(jar))
    return java


def _ask(command: Sequence[str], lines: Sequence[str], expected: int) -> list[str]:
    text = "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8")
    answer = done.stdout.split("\n")
    answer = answer[:-1] if answer and not answer[-1] else answer
    if done.returncode or len(answer) != expected:
        raise _strange(command, (done.stderr or done.stdout).strip()[:200])
    return answer


def _strange(command: Sequence[str], got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "--meteor-jar",
        expected="the METEOR 1.5 program",
        got=got,
        remedy=f"try it by hand: {' '.join(command)}",
    )


def _plain(text: str) -> str:
    """One line without the separator."""
    return " ".join(text.replace("|||", " ").split())
