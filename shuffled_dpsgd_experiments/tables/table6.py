"""Table 6: the paper's own audit, and what it was able to see."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shuffled_dpsgd.accounting import certified_bracket
from shuffled_dpsgd_experiments.audits.paper_audit import PaperSetting, paper_audit
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, in_one_file, origin_of
from shuffled_dpsgd_experiments.tables.printed import AUDIT

TITLE = "Table 6: the audit"
RESULT = "audit_paper_table6.json"


def run(scale: str) -> dict[str, Any]:
    """The paper's audit of single steps; `demo` repeats it less often on pure noise."""
    setting = PaperSetting(repetitions=20 if scale == "demo" else 200)
    rows = paper_audit(setting, tuple(epsilon for epsilon, _ in AUDIT))
    return {"scale": scale, "setting": asdict(setting), "rows": rows}


def show(raw: dict[str, Any]) -> Exhibit:
    """The printed audits beside ours, and beside what the estimator says where nothing leaks."""
    printed = dict(AUDIT)
    setting = raw["setting"]
    rows = []
    for row in raw["rows"]:
        claim = row["run_epsilon"]["epsilon"]
        quantiles = row["readings"]["strict"]["quantiles_on_pure_noise"]
        certified = certified_bracket(
            noise_multiplier=row["noise_multiplier"],
            sampling_prob=setting["sampling_prob"],
            num_steps=setting["num_steps"],
            delta=setting["delta"],
        ).upper
        rows.append(
            ExhibitRow(
                what=f"theoretical ε = {claim:g} (heuristic)",
                paper=f"audited {printed[claim]:g}",
                ours=f"{row['paper_estimator']['epsilon']:.4f} (measured, a point estimate)",
                certified=f"{certified:.3g}",
                verdict="says nothing: on pure noise the same estimator prints "
                f"{quantiles[0]:.2f} to {quantiles[2]:.2f}",
            )
        )
    return Exhibit(
        name="table6",
        title=TITLE,
        origin=f"ViT's setting, {setting['num_observations']} observations in each world. "
        f"{origin_of(raw)}",
        rows=tuple(rows),
        notes=(
            f"The paper's estimate has no confidence level: {'; '.join(raw['rows'][0]['lacks'])}.",
            "A Dirac canary read at a fixed index cannot see what a shuffle fails to hide. "
            "Stronger adversaries at the same noise: docs/auditing.md.",
        ),
    )


TABLE = in_one_file("table6", TITLE, run, show, result=RESULT)
