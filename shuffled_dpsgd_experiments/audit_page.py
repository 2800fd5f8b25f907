"""The tables of docs/auditing.md about real models, from the results that `real_audits` wrote.

    python -m shuffled_dpsgd_experiments.audit_page results docs/auditing.md

rewrites what stands between the two marks of the page, and `figures/real-models.svg` beside it;
nothing in either is typed by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- real models: begin -->", "<!-- real models: end -->"
MODES = ("step", "runs", "one-run", "black-box")
NAMES = {"e2e": "E2E", "sst2": "SST-2"}
Record = dict[str, Any]


def audits_in(results: Path) -> list[Record]:
    """Every audit of a real model in the folder, steps first."""
    found = []
    for path in sorted(results.glob("audit_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("mode") in MODES:
            found.append({"file": path.name, **record})
    return sorted(found, key=lambda record: (MODES.index(record["mode"]), record["file"]))


def page_part(results: Path) -> str:
    """All tables, as Markdown."""
    audits = audits_in(results)
    steps = [record for record in audits if record["mode"] == "step"]
    boxes = [record for record in audits if record["mode"] == "black-box"]
    parts = [summary(audits), "![claimed, shown and certified](figures/real-models.svg)"]
    if steps:
        parts.append(adversaries(steps))
    if boxes:
        parts.append(black_boxes(boxes))
    return "\n\n".join(parts)


def summary(audits: Sequence[Record]) -> str:
    """One row per audit: what was run, what is certified and claimed, the bound, the verdict."""
    rows = [
        (
            what(record),
            sample(record),
            shown(claim_of(record, "proven")),
            shown(claim_of(record, "heuristic")),
            strongest(record),
            verdict(record),
            cost(record),
        )
        for record in audits
    ]
    head = (
        "audit",
        "sample",
        "certified ε (proven)",
        "the paper's ε (heuristic)",
        "strongest bound (measured, joint 95 %)",
        "verdict on the paper's, on the certified",
        "cost",
    )
    return table(head, rows)


def adversaries(steps: Sequence[Record]) -> str:
    """Bounds of every adversary of the step audits, each at its own 95 %."""
    labels = list(
        dict.fromkeys((a["adversary"], a["canary"]) for record in steps for a in record["attacks"])
    )
    rows = []
    for adversary, canary in labels:
        cells = []
        for record in steps:
            bounds = [
                a["bounds"]
                for a in record["attacks"]
                if (a["adversary"], a["canary"]) == (adversary, canary)
            ]
            cells.append(_pair(bounds[0]) if bounds else "")
        rows.append((f"{adversary} ({canary})", *cells))
    return table(
        ("order statistics / over Gaussian curves*", *(what(record) for record in steps)), rows
    )


def black_boxes(boxes: Sequence[Record]) -> str:
    """Areas under the ROC curve with the shuffle and without."""
    rows = []
    for record in boxes:
        for attack in ("loss", "ratio"):
            arms, gap = record["arms"], record["on_minus_off"][attack]
            half = (gap["high"] - gap["low"]) / 2.0
            rows.append(
                (
                    f"{what(record)}: {attack}",
                    f"{arms['off'][attack]['pooled_area']:.3f}",
                    f"{arms['on'][attack]['pooled_area']:.3f}",
                    f"{gap['mean_difference']:.3f} ± {half:.3f}",
                    f"{record['largest_paired_difference']:.0e}",
                )
            )
    head = (
        "attack, area under the ROC curve",
        "shuffle off",
        "shuffle on",
        "on minus off, 95 % over seeds",
        "largest difference of a loss, same noise",
    )
    return table(head, rows)


def what(record: Record) -> str:
    """The audit in words, with a link to its file."""
    return f"[{words_of(record)}](../results/{record['file']})"


def words_of(record: Record) -> str:
    """The model, the data and the kind of audit."""
    config = record["config"]
    model = f"{config['model']['name']} on {NAMES.get(config['data']['format'], '')}"
    extra = []
    if record["mode"] == "one-run" and not record["setting"].get("other_records", True):
        extra.append("canaries alone")
    if record.get("fit_steps"):
        extra.append("initial weights fitted")
    kind = {"step": "one step", "runs": "repeated runs", "black-box": "black box"}
    return ", ".join([model, kind.get(record["mode"], "one run"), *extra])


def sample(record: Record) -> str:
    """How much was looked at."""
    setting = record["setting"]
    if record["mode"] == "step":
        made = setting["observations_made"]
        return f"{made} + {made} releases"
    steps = _steps(record)
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


def strongest(record: Record) -> str:
    bound = bound_of(record)
    attack = _decisive(record)["strongest_attack"]
    return f"**{bound:.2f}**" + (f", {attack}" if bound > 0.0 else "")


def _decisive(record: Record) -> Record:
    found = judged(record, "heuristic") or judged(record, "proven")
    assert found is not None, "every audit judges the certified claim"
    return found


def verdict(record: Record) -> str:
    found = [judged(record, kind) for kind in ("heuristic", "proven")]
    return "; ".join("–" if one is None else one["outcome"] for one in found)


def cost(record: Record) -> str:
    spent = record["cost"]
    end = ", cut short" if spent.get("cut_short") else ""
    return f"{spent['seconds']:.0f} s, {spent['device'].replace('NVIDIA ', '')}{end}"


def shown(epsilon: float | None) -> str:
    if epsilon is None:
        return "–"
    return f"{epsilon:,.0f}" if epsilon >= 1000.0 else f"{epsilon:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rewritten(page: str, part: str) -> str:
    """The page with `part` between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{rest.split(END)[1]}"


def _pair(bounds: Record) -> str:
    plain, gaussian = bounds["order-statistics"], bounds["order-statistics-gaussian"]
    return f"{plain['epsilon']:.2f} / {gaussian['epsilon']:.2f}"


def _steps(record: Record) -> int:
    return int(record["config"]["training"]["num_steps"])


def main(arguments: Sequence[str]) -> None:
    results, page = map(Path, arguments)
    text = rewritten(page.read_text(encoding="utf-8"), page_part(results))
    page.write_text(text, encoding="utf-8")
    from shuffled_dpsgd_experiments.audit_figure import save

    save(audits_in(results), page.parent / "figures" / "real-models.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
