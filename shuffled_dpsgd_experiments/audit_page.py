"""The table of docs/auditing.md about real models, from the results that `real_audits` wrote.

    python -m shuffled_dpsgd_experiments.audit_page results docs/auditing.md

rewrites what stands between the two marks of the page, and `figures/real-models.svg` beside it;
nothing in either is typed by hand.
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

BEGIN, END = "<!-- real models: begin -->", "<!-- real models: end -->"
FIGURE = "![claimed, shown and certified](figures/real-models.svg)"
KINDS = {
    "step": "one step",
    "runs": "repeated runs",
    "one-run": "one run",
    "black-box": "black box",
}
NAMES = {"e2e": "E2E", "sst2": "SST-2"}
HEAD = (
    "audit",
    "sample",
    "certified ε (proven)",
    "the paper's ε (heuristic)",
    "strongest bound (measured, joint 95 %)",
    "verdict on the paper's, on the certified",
    "cost",
)
Record = dict[str, Any]


def audits_in(results: Path) -> list[Record]:
    """Every audit of a real model in the folder, steps first."""
    found = []
    for path in sorted(results.glob("audit_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("mode") in KINDS:
            found.append({"file": path.name, **record})
    return sorted(found, key=lambda record: (list(KINDS).index(record["mode"]), record["file"]))


def page_part(results: Path) -> str:
    """The table, one row per audit, as Markdown, and the figure."""
    rows = [HEAD, ["---"] * len(HEAD), *map(row_of, audits_in(results))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{FIGURE}"


def row_of(record: Record) -> tuple[str, ...]:
    """What was run, what is certified and claimed, the bound, the verdict, the cost."""
    bound, found = bound_of(record), [judged(record, kind) for kind in ("heuristic", "proven")]
    attack = f", {_decisive(record)['strongest_attack']}" if bound > 0.0 else ""
    spent = record["cost"]
    end = ", cut short" if spent.get("cut_short") else ""
    return (
        f"[{words_of(record)}](../results/{record['file']})",
        sample(record),
        shown(claim_of(record, "proven")),
        shown(claim_of(record, "heuristic")),
        f"**{bound:.2f}**{attack}",
        "; ".join("–" if one is None else one["outcome"] for one in found),
        f"{spent['seconds']:.0f} s, {spent['device'].replace('NVIDIA ', '')}{end}",
    )


def words_of(record: Record) -> str:
    """The model, the data and the kind of audit."""
    config = record["config"]
    model = f"{config['model']['name']} on {NAMES.get(config['data']['format'], '')}"
    extra = []
    if record["mode"] == "one-run" and not record["setting"].get("other_records", True):
        extra.append("canaries alone")
    if record.get("fit_steps"):
        extra.append("initial weights fitted")
    return ", ".join([model, KINDS[record["mode"]], *extra])


def sample(record: Record) -> str:
    """How much was looked at."""
    setting, steps = record["setting"], record["config"]["training"]["num_steps"]
    if record["mode"] == "step":
        made = setting["observations_made"]
        return f"{made} + {made} releases"
    if record["mode"] == "runs":
        return f"{setting['runs_without']} + {setting['runs_with']} runs of {steps} steps"
    if record["mode"] == "black-box":
        seeds = len(record["arms"]["off"]["loss"]["area_by_seed"])
        return f"{seeds} seeds, {setting['num_canaries']} records, {steps} steps"
    records = setting["num_input_canaries"]
    beside = f", {records} records" if records else ""
    return f"{setting['num_gradient_canaries']} gradients{beside}, {steps} steps"


def judged(record: Record, kind: str) -> Record | None:
    """The verdict on a claim; the paper's is on trial only where its noise was used."""
    if kind == "heuristic" and record["config"]["privacy"]["accounting"] != "paper":
        return None
    found: list[Record] = [v for v in record["verdicts"] if v["claim"]["kind"] == kind]
    return found[0] if found else None


def claim_of(record: Record, kind: str) -> float | None:
    found = judged(record, kind)
    return None if found is None else float(found["claim"]["epsilon"])


def bound_of(record: Record) -> float:
    """The bound that judged the paper's claim, or the certified one where that is alone."""
    return float(_decisive(record)["strongest_bound"])


def _decisive(record: Record) -> Record:
    found = judged(record, "heuristic") or judged(record, "proven")
    assert found is not None, "every audit judges the certified claim"
    return found


def shown(epsilon: float | None) -> str:
    if epsilon is None:
        return "–"
    return f"{epsilon:,.0f}" if epsilon >= 1000.0 else f"{epsilon:.3g}"


def rewritten(page: str, part: str) -> str:
    """The page with `part` between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{rest.split(END)[1]}"


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
        axes.plot(
            *zip(*places, strict=True),
            mark,
            color=colour,
            markersize=9,
            markeredgewidth=2,
            label=label,
        )
    axes.set_yticks(range(len(audits)), [words_of(record) for record in audits])
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set(xlabel="ε", xlim=(-0.02, None))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def save(audits: Sequence[Record], path: Path) -> None:
    """As SVG or PNG, by the name's ending."""
    save_drawing(draw(audits), path)


def main(arguments: Sequence[str]) -> None:
    results, page = map(Path, arguments)
    text = rewritten(page.read_text(encoding="utf-8"), page_part(results))
    page.write_text(text, encoding="utf-8")
    save(audits_in(results), page.parent / "figures" / "real-models.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
