"""Rows of single steps in benchmarks/README.md say what their records hold."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| 20\d\d-\d\d-\d\d \|", line)
]
STEPS = [row for row in ROWS if row[3].startswith("step `")]


def compared(entries: list[dict[str, Any]], adapter: str, baseline: str) -> dict[str, Any] | None:
    """The measurement of `adapter` beside `baseline` that has most rounds."""
    found = [e for e in entries if e["adapter"] == adapter and baseline in e["round_ratios"]]
    return max(found, key=lambda e: (len(e["block_seconds"]), e["run"]), default=None)


def ratio(entries: list[dict[str, Any]], adapter: str, baseline: str) -> float:
    found = compared(entries, adapter, baseline)
    assert found is not None
    return statistics.median(found["round_ratios"][baseline])


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row[0]} {row[3]}")
def test_a_row_of_a_step_is_its_record(row: list[str]) -> None:
    name = re.findall(r"`(.+?)`", row[3])[0]
    path = FOLDER / re.findall(r"\]\((.+?)\)", row[8])[0]
    measurements = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    entries = [e for e in measurements if e["workload"] == name and not e["error"]]
    of_plain = f"{ratio(entries, 'ours', 'plain'):.2f}"
    if "compiled" in row[4]:
        of_plain += f", compiled {ratio(entries, 'ours:compiled', 'plain:compiled'):.2f}"
    assert row[4] == of_plain
    if row[5] != "–":
        assert row[5] == f"{ratio(entries, 'ours', 'opacus:ghost'):.1f}"
    ours = compared(entries, "ours", "plain")
    assert ours is not None
    (plain,) = (e for e in entries if (e["adapter"], e["run"]) == ("plain", ours["run"]))
    assert row[7] == f"{ours['peak_gib'] / plain['peak_gib']:.2f}"


def test_every_row_names_a_commit_and_links_its_records() -> None:
    assert len(STEPS) >= 9
    listed = set()
    for row in ROWS:
        assert re.fullmatch(r"(in )?`[0-9a-f]{7,8}`(, `[0-9a-f]{7,8}`)*", row[1]), row
        links = re.findall(r"\]\((.+?\.json)\)", row[8])
        assert links, row
        listed |= {FOLDER / link for link in links}
    assert {*(FOLDER / "reports").glob("*.json")} <= listed


def test_the_row_of_recurrent_layers_is_its_record() -> None:
    row = next(row for row in ROWS if "recurrent" in row[8])
    path = FOLDER / re.findall(r"\]\((.+?)\)", row[8])[0]
    record = json.loads(path.read_text(encoding="utf-8"))
    assert f"`{record['commit']}`" == row[1]
    for column, side, digits in ((4, "plain", 2), (5, "opacus", 1)):
        parts = []
        for layer in ("GRU", "LSTM", "RNN"):
            entries = [each for each in record["results"] if each["layer"] == layer]
            found = [each["throughput"][f"ours over {side}"] for each in entries]
            parts.append(f"{min(found):.{digits}f} to {max(found):.{digits}f}")
        assert row[column] == "; ".join(parts)


ENDS = ("", "@before")


def test_the_row_of_plain_kernels_is_its_record() -> None:
    path = FOLDER / "reports" / "2026-11-19-cpu-simpler.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    core = {
        (entry["workload"], entry["adapter"]): statistics.median(entry["core_seconds"])
        for entry in record["measurements"]
    }
    (row,) = (row for row in ROWS if path.name in row[8])
    found = [
        ", ".join(f"{core[name, 'plain' + at] / core[name, 'ours' + at]:.2f}" for at in ENDS)
        for name in re.findall(r"`([a-z-]+-\d+x\d+)`", row[3])
    ]
    later = json.loads((path.parent / "2026-11-20-cpu-before.json").read_text(encoding="utf-8"))
    assert row[1] == f"`{record['commit']}`, `{later['commit']}`"
    assert row[4] == "; ".join(found)
    (again,) = (
        entry
        for entry in later["measurements"]
        if (entry["workload"], entry["adapter"]) == ("bert-small-8x64", "ours")
    )
    of_before = statistics.median(again["round_ratios"]["ours@before"])
    assert f"the latter at {of_before:.2f} of `{later['before']}`" in row[3]


def test_the_comparison_with_opake_is_its_record() -> None:
    """In processor time, since the machine was busy with other programs."""
    path = FOLDER / "reports" / "2026-11-19-cpu-opake.json"
    core = {
        (entry["workload"], entry["adapter"]): statistics.median(entry["core_seconds"])
        for entry in json.loads(path.read_text(encoding="utf-8"))["measurements"]
        if not entry["error"]
    }

    def of_plain(workload: str, adapter: str) -> str:
        return f"{core[workload, 'plain'] / core[workload, adapter]:.2f}"

    gpt, vit = "gpt2-small-8x64", "own-vit-small-8x197"
    (row,) = (row for row in ROWS if path.name in row[8])
    assert row[4] == f"{of_plain(gpt, 'ours')}; {of_plain(vit, 'ours')}"
    assert row[5] == f"{core[gpt, 'opacus:ghost'] / core[gpt, 'ours']:.1f}; fails"
    assert row[3].endswith(f"{of_plain(gpt, 'opake')}; {of_plain(vit, 'opake')} of plain")
    times = [core[each, "opake"] / core[each, "ours"] for each in (gpt, vit)]
    assert row[6] == "; ".join(f"{ratio:.1f}" for ratio in times)
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    for name, workload, ghost in (
        ("small GPT-2 8×64", gpt, row[5].partition(";")[0]),
        ("small ViT 8×197, written by hand", vit, "it fails"),
    ):
        opake = core[workload, "opake"] / core[workload, "ours"]
        cells = f"{of_plain(workload, 'ours')} | – | {ghost} | {opake:.1f} | – |"
        assert f"| CPU, {name} | {cells}" in page


def test_the_readmes_table_is_the_records() -> None:
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    named = {
        "GPT-2 32×128": "gpt2-32x128",
        "BERT-base 64×128": "bert-base-64x128",
        "GPT-2-large 32×128": "gpt2-large-32x128",
        "ViT-B 128×197": "vit-base-128x197",
        "GPT-2 8×1024": "gpt2-8x1024",
    }
    lines = re.findall(r"^\| H200, (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _ in lines] == list(named)
    for name, cells in lines:
        row = next(r for r in ROWS if r[0] == "2026-11-15" and f"step `{named[name]}`" in r[3])
        found = [cell.partition(" (")[0] for cell in cells.split(" | ")]
        assert found == [*row[4].split(", compiled "), row[5], "–", row[7]]
