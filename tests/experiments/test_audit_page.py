"""The table about real models is that of the committed results, and says what these say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shuffled_dpsgd_experiments.audit_page import (
    BEGIN,
    END,
    audits_in,
    page_part,
    rewritten,
    save,
    words_of,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGE = (ROOT / "docs" / "auditing.md").read_text(encoding="utf-8")


def test_the_page_holds_the_tables_of_the_results() -> None:
    assert rewritten(PAGE, page_part(RESULTS)) == PAGE


@pytest.mark.parametrize("record", audits_in(RESULTS), ids=lambda record: record["file"])
def test_every_row_has_its_claims_bound_verdict_and_cost(record: dict) -> None:
    kinds = [verdict["claim"]["kind"] for verdict in record["verdicts"]]
    assert kinds[0] == "proven"
    assert record["cost"]["seconds"] > 0
    assert record["environment"]["date"]
    for verdict in record["verdicts"]:
        above = verdict["strongest_bound"] > verdict["claim"]["epsilon"]
        assert above == verdict["outcome"].startswith("refuted")
    assert record["verdicts"][0]["outcome"] == "consistent", "a theorem was refuted: our bug"


def test_the_figure_names_every_audit(tmp_path: Path) -> None:
    audits = audits_in(RESULTS)
    save(audits, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert all(words_of(record) in drawn for record in audits)


def test_a_page_is_rewritten_between_its_marks_alone(tmp_path: Path) -> None:
    page = f"before {BEGIN} old {END} after"
    assert rewritten(page, "new") == f"before {BEGIN}\n\nnew\n\n{END} after"
    (tmp_path / "audit_other.json").write_text(json.dumps({"mode": "else"}), encoding="utf-8")
    assert audits_in(tmp_path) == []
