"""The picture of the audits of real models shows the committed results, and they are sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shuffled_dpsgd_experiments.audit_figure import audits_in, bound_of, claim_of, main, words_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("record", audits_in(RESULTS), ids=lambda record: record["file"])
def test_every_audit_has_its_claims_bound_verdict_and_cost(record: dict) -> None:
    kinds = [verdict["claim"]["kind"] for verdict in record["verdicts"]]
    assert kinds[0] == "proven"
    assert record["cost"]["seconds"] > 0
    assert record["environment"]["date"]
    for verdict in record["verdicts"]:
        above = verdict["strongest_bound"] > verdict["claim"]["epsilon"]
        assert above == verdict["outcome"].startswith("refuted")
    assert record["verdicts"][0]["outcome"] == "consistent", "a theorem was refuted: our bug"
    assert bound_of(record) <= claim_of(record, "proven")


def test_the_figure_names_every_audit_and_so_does_the_committed_one(tmp_path: Path) -> None:
    main([str(RESULTS), str(tmp_path / "drawn.svg")])
    audits = audits_in(RESULTS)
    assert len(audits) >= 6
    for path in (tmp_path / "drawn.svg", ROOT / "docs" / "figures" / "real-models.svg"):
        drawn = path.read_text(encoding="utf-8")
        assert all(words_of(record) in drawn for record in audits)


def test_other_audits_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "audit_other.json").write_text(json.dumps({"mode": "else"}), encoding="utf-8")
    assert audits_in(tmp_path) == []
