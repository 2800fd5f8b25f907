"""The loop in the README runs as it is printed, for every value that its comments suggest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
CODE = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
ALTERNATIVE = re.compile(r"or: ((?:[^,(]|\(\)|, (?!or: ))+)")


def variants(code: str) -> list[str]:
    """The code as it stands, and once for each `or: ...` in a comment, put in its line's place.

    >>> variants("f(a=1)\\n    b=2,  # or: b=3, or: b=4 (why)")
    ['f(a=1)\\n    b=2,  # or: b=3, or: b=4 (why)', 'f(a=1)\\n    b=3,', 'f(a=1)\\n    b=4,']
    """
    lines = code.split("\n")
    found = [code]
    for place, line in enumerate(lines):
        statement, _, comment = line.partition("#")
        indent = statement[: len(statement) - len(statement.lstrip())]
        comma = "," if statement.rstrip().endswith(",") else ""
        for other in ALTERNATIVE.findall(comment):
            changed = [*lines[:place], f"{indent}{other.strip()}{comma}", *lines[place + 1 :]]
            found.append("\n".join(changed))
    return found


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) < 150


# What each variant of the loop plans: accounting, shuffle, batch clip.
PLANNED: dict[str, tuple[str, str, float | None]] = {
    "as it stands": ("certified", "every-step", None),
    "paper": ("paper", "every-step", 1.0),
    "at release": ("certified", "at-release", None),
    "no shuffle": ("certified", "off", None),
    "plain backward": ("certified", "every-step", None),
}


@pytest.mark.parametrize(
    ("code", "planned"),
    list(zip(variants(CODE[0]), PLANNED.values(), strict=True)),
    ids=list(PLANNED),
)
def test_the_loop_runs(
    code: str, planned: tuple[str, str, float | None], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    private = names["private"]
    private.close()
    plan = private.plan
    clips = {block.batch_clip_norm for block in plan.blocks} - {None}
    assert (plan.accounting, plan.shuffle, clips.pop() if clips else None) == planned
    assert private.finished
    assert private.released
    assert "proven" in capsys.readouterr().out
