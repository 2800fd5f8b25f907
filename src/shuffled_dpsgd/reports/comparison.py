"""Several runs on one page: what they reached, at which ε, and in which settings they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import CheckpointError, require
from shuffled_dpsgd.reports.page import PARTS, breakable, page
from shuffled_dpsgd.reports.records import MetricsLog, StepRecord
from shuffled_dpsgd.reports.run_report import PRIVATE_METRICS_WARNING, flatten
from shuffled_dpsgd.reports.style import BLUE, GREEN, ORANGE, PURPLE, RED
from shuffled_dpsgd.training.card import PrivacyCard
from shuffled_dpsgd.training.saved_card import read_card

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE)
CURVES = {
    "heldout_score": "Held-out score",
    "heldout_loss": "Held-out loss",
    "loss": "Training loss",
    "certified_epsilon": "Certified ε, spent so far",
}


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One finished run: its folder's name, its card, its settings and its steps."""

    name: str
    card: PrivacyCard
    settings: Mapping[str, Any]
    records: Sequence[StepRecord]
    score_name: str
    score: float | None


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Finished runs from their folders, of which there must be two or more.

    Raises:
        CheckpointError: a folder is not that of a finished run.
    """
    require(len(folders) >= 2, "runs", "two folders or more", len(folders))
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    return [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read_run(folder: Path, name: str) -> ComparedRun:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        done = summary["finished"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not the folder of a finished run; {error}") from error
    if not done:
        raise CheckpointError(
            f"{folder}: the run is not finished; continue it with "
            f"`shuffled-dpsgd train --resume {folder}`"
        )
    return ComparedRun(
        name=name,
        card=read_card(folder),
        settings=summary["config"],
        records=MetricsLog(folder / "metrics.jsonl").read(),
        score_name=summary["score_name"],
        score=summary["heldout_score"],
    )


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """The page: results and claims, then the settings that differ, then curves."""
    figures = "".join(
        f'<figure><figcaption>{escape(title)}</figcaption><div class="curve" data-name="{name}">'
        '</div><p class="read muted"></p></figure>'
        for name, title in CURVES.items()
    )
    body = (
        f"<h1>{len(runs)} runs beside each other</h1>"
        f'<section><h2>Results</h2><div class="wide">{_table(_results(runs), runs)}</div>'
        "<p>Runs on the same records add up: what all of them spent together is in their budget "
        "file, if they have one.</p></section>"
        "<section><h2>Settings that differ</h2>"
        f'<div class="wide">{_table(differing(runs), runs)}</div></section>'
        f'<section><h2>Curves</h2><p class="warning">{escape(PRIVATE_METRICS_WARNING)}</p>'
        f'<div class="figures">{figures}</div></section>'
        f'<script type="application/json" id="runs">{_data(runs)}</script>'
        f"<script>{PARTS['script']}</script>"
    )
    return page(title="Runs beside each other", body=body, css=PARTS["comparison"])


def _results(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    def claim(run: ComparedRun) -> str:
        found = run.card.certified
        return run.card.no_claim if found is None else found.describe()

    scores = [
        "not measured" if run.score is None else f"{run.score_name} {run.score:.4f}" for run in runs
    ]
    return [
        ("held out", scores),
        ("certified ε", [claim(run) for run in runs]),
        ("verdict", [run.card.verdicts.get("certified", "nothing is claimed") for run in runs]),
        ("steps", [f"{run.card.steps_released} of {run.card.steps_planned}" for run in runs]),
        ("unit", [run.card.subject.get("unit", "one row") for run in runs]),
    ]


def differing(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Settings by dotted name that are not the same in all runs."""
    flat = [dict(flatten(run.settings)) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = [(name, [each.get(name, "–") for each in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _table(rows: Sequence[tuple[str, Sequence[str]]], runs: Sequence[ComparedRun]) -> str:
    if not rows:
        return "<p>None.</p>"
    marks = zip(runs, _colours(runs), strict=True)
    heads = "".join(f'<th style="color:{c}">{escape(run.name)}</th>' for run, c in marks)
    lines = "".join(
        f"<tr><th>{breakable(name)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows
    )
    return f"<table><tr><th></th>{heads}</tr>{lines}</table>"


def _colours(runs: Sequence[ComparedRun]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def _data(runs: Sequence[ComparedRun]) -> str:
    """The curves as JSON that cannot end its element."""
    plain = [
        {
            "name": run.name,
            "colour": colour,
            "curves": {
                name: [[r.step, v] for r in run.records if (v := getattr(r, name)) is not None]
                for name in CURVES
            },
        }
        for run, colour in zip(runs, _colours(runs), strict=True)
    ]
    return json.dumps(plain, allow_nan=False).replace("<", "\\u003c")
