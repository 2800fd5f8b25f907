"""Help is quick, and every verb has an example and speaks JSON."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app

HEAVY = ("torch", "transformers", "scipy", "matplotlib", "dp_accounting", "numpy")


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that is not a group of others, with the words that lead to it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, child in below.items():
        yield from verbs(child, (*path, name))


VERBS = dict(verbs(typer.main.get_command(app)))


def test_there_are_verbs() -> None:
    assert ("inspect",) in VERBS
    assert len(VERBS) > 5


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_verb_speaks_json_and_has_an_example(path: tuple[str, ...]) -> None:
    assert any("--json" in parameter.opts for parameter in VERBS[path].params)
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert f"shuffled-dpsgd {' '.join(path)}" in done.stdout.partition("xample")[2]


@pytest.mark.parametrize("path", [(), ("audit",)], ids=["all verbs", "audit"])
def test_groups_of_verbs_have_examples_of_verbs(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "1000"})
    assert done.exit_code == 0
    examples = done.stdout.partition("Examples: ")[2].split(" · ")
    assert len(examples) > 2
    for example in examples:
        words = example.split()
        assert words[0] == "shuffled-dpsgd"
        known = [verb for verb in VERBS if tuple(words[1 : 1 + len(verb)]) == verb]
        assert len(known) == 1
        assert known[0][: len(path)] == path
        options = {name for parameter in VERBS[known[0]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from shuffled_dpsgd.cli.main import app\n"
        "try:\n    app(['--help'])\n"
        f"finally:\n    print('loaded:', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "loaded: []" in done.stdout
