"""The loop in the README runs as it is printed, for every value that its comments suggest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

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
    assert len(README.read_text().splitlines()) <= 120
    assert sum(bool(line.strip()) for line in CODE[0].splitlines()) <= 15


def test_the_figures_sentences_are_the_records() -> None:
    frontier = json.loads((README.parent / "results/frontier.json").read_text(encoding="utf-8"))
    scores = {}
    for found in frontier["workloads"]["digits"]["points"]:
        if found["point"]["epsilon"] == 0.5:
            scores[found["point"]["batch_clip_ratio"]] = found
    plain, best = scores.pop(None), max(scores.values(), key=lambda p: p["scores"]["test"]["mean"])
    gain = best["scores"]["test"]["mean"] - plain["scores"]["test"]["mean"]
    text = " ".join(README.read_text().split())
    assert f"is over {int(gain)} points more accurate on digits than DP-SGD" in text
    assert f"what is proven of it there is {best['certified_epsilon']:.2f}" in text
    compared = [each for one in frontier["workloads"].values() for each in one["comparisons"]]
    assert compared
    assert "above DP-SGD" not in {each["verdict"] for each in compared}


def test_what_is_said_of_model_types_is_the_record() -> None:
    sweep = json.loads((README.parent / "results/model_sweep.json").read_text(encoding="utf-8"))
    types, batches = Counter[str](), Counter[str]()
    for row in sweep["rows"]:
        if row["built"] != "yes":
            continue
        ends = [re.split("[: ]", end)[0] for end in row["batches"].values()]
        batches.update("agrees" if end in ("exact", "rounded") else end for end in ends)
        best = ("exact", "rounded", "raised", "random", "refused", "fails")
        types[next(end for end in best if end in ends)] += 1
    assert types.keys() <= {"exact", "rounded", "raised", "refused", "fails"}
    assert batches.keys() == {"agrees", "refused", "fails", "random", "raised"}
    built, compared = types.total(), types["exact"] + types["rounded"]
    page, checks = (
        " ".join((README.parent / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/checks.md")
    )
    assert f"Of {built} model types** of Hugging Face, built tiny, {compared} had a batch" in page
    assert f"; {types['refused']} were refused by name in every batch, " in page
    assert f" {types['fails']} fail without the engine too, and {types['raised']} ended" in page
    others = batches.total() - batches["agrees"]
    assert f"tiny models of {built} Hugging Face types" in checks
    assert f"of which {compared} had a batch compared. {batches['agrees']} batches agree" in checks
    assert f"none differs; {others} were refused, failed without the engine too, or" in checks


# What each variant of the loop plans: accounting, shuffle, batch clip.
PLANNED: dict[str, tuple[str, str, float | None]] = {
    "as it stands": ("certified", "every-step", None),
    "paper": ("paper", "every-step", 1.0),
    "at release": ("certified", "at-release", None),
    "no shuffle": ("certified", "off", None),
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
    printed = capsys.readouterr().out
    (said,) = re.findall(r"# (ε = .+?), and", CODE[0])
    assert "(proven)" in printed
    assert (said in printed) is (planned[0] == "certified")


# Refuses every module of a distribution that the install line does not bring.
AS_INSTALLED = """
import runpy, sys
from importlib.metadata import packages_distributions

ALLOWED = set({allowed!r})
OTHERS = {{
    module
    for module, owners in packages_distributions().items()
    if not any(owner.lower().replace("_", "-") in ALLOWED for owner in owners)
}}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in OTHERS:
            return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
sys.argv = {command!r}
runpy.run_module("shuffled_dpsgd", run_name="__main__")
"""


def installed_by(requirements: list[str]) -> set[str]:
    """The distributions that pip would install for these, as far as they are here."""
    found: set[str] = set()
    waiting = [(Requirement(line), "") for line in requirements]
    while waiting:
        wanted, extra = waiting.pop()
        name = wanted.name.lower().replace("_", "-")
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        known = name in found and not wanted.extras
        try:
            needs = [] if known else metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for inner in wanted.extras or {""}:
            waiting += [(Requirement(line), inner) for line in needs]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["train", "digits", "--epochs", "1", "--batch-size", "480", "--json"],
        ["inspect", "--model", "gpt2", "--scope", "full", "--json"],
    ],
    ids=lambda command: command[0],
)
def test_the_install_line_brings_what_the_commands_need(command: list[str], tmp_path: Path) -> None:
    """The first command of the page would not run if its extra lacked a package."""
    (extra,) = re.findall(r"-e\s+'\.\[(\w+)\]'", README.read_text())
    assert f"shuffled-dpsgd {command[0]}" in README.read_text()
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = installed_by([*project["dependencies"], *extras[extra]])
    assert "opacus" not in allowed
    allowed.add("shuffled-dpsgd")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            AS_INSTALLED.format(allowed=sorted(allowed), command=["", *command]),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(README.parent / "src")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)
