"""One picture of all audits of real models: what is claimed, what was shown, what is certified.

python -m shuffled_dpsgd_experiments.audit_figure results docs/figures/real-models.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.reports.style import BLUE, HEURISTIC, PROVEN, house_style, save_drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"step": "one step", "one-run": "one run", "black-box": "black box"}
NAMES = {"e2e": "E2E", "sst2": "SST-2"}
Record = dict[str, Any]


def audits_in(results: Path) -> list[Record]:
    """Every audit of a real model in the folder, steps first."""
    found = []
    for path in sorted(results.glob("audit_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("mode") in KINDS:
            found.append({"file": path.name, **record})
    return sorted(found, key=lambda record: (list(KINDS).index(record["mode"]), record["file"]))


def words_of(record: Record) -> str:
    """The model, the data and the kind of audit."""
    config, kind = record["config"], KINDS[record["mode"]]
    alone = "" if record["setting"].get("other_records", True) else ", canaries alone"
    return f"{config['model']['name']} on {NAMES.get(config['data']['format'], '')}, {kind}{alone}"


def judged(record: Record, kind: str) -> Record | None:
    """The verdict on a claim; the paper's is on trial only where its noise was used."""
    if kind == "heuristic" and record["config"]["privacy"]["accounting"] != "paper":
        return None
    return next((v for v in record["verdicts"] if v["claim"]["kind"] == kind), None)


def claim_of(record: Record, kind: str) -> float | None:
    found = judged(record, kind)
    return None if found is None else float(found["claim"]["epsilon"])


def bound_of(record: Record) -> float:
    """The bound that judged the paper's claim, or the certified one where that is alone."""
    found = judged(record, "heuristic") or judged(record, "proven")
    assert found is not None, "every audit judges the certified claim"
    return float(found["strongest_bound"])


@house_style()
def draw(audits: Sequence[Record]) -> Figure:
    """A line per audit, ε to the right: a bound right of the paper's claim refutes it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 1.6 + 0.42 * len(audits)), layout="constrained")
    axes = figure.subplots()
    looks = (
        ("the paper's claim (heuristic)", HEURISTIC, "x", lambda r: claim_of(r, "heuristic")),
        ("strongest joint bound (measured)", BLUE, "o", bound_of),
        ("certified (proven)", PROVEN, "|", lambda r: claim_of(r, "proven")),
    )
    for label, colour, mark, value_of in looks:
        values = [value_of(record) for record in audits]
        places = [(x, row) for row, x in enumerate(values) if x is not None]
        look: dict[str, Any] = {
            "color": colour,
            "label": label,
            "markersize": 9,
            "markeredgewidth": 2,
        }
        axes.plot(*zip(*places, strict=True), mark, **look)
    axes.set_yticks(range(len(audits)), [words_of(record) for record in audits])
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set(xlabel="ε", xlim=(-0.02, None))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def main(arguments: Sequence[str]) -> None:
    results, figure = map(Path, arguments)
    save_drawing(draw(audits_in(results)), figure)


if __name__ == "__main__":
    main(sys.argv[1:])
