"""The committed figures of docs/claims.md: recomputed where cheap, held against the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shuffled_dpsgd_experiments import claims
from shuffled_dpsgd_experiments.figures import fig2
from shuffled_dpsgd_experiments.reproductions import REPRODUCTIONS

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def test_the_page_quotes_the_certified_epsilons() -> None:
    for row in COMMITTED["certified_at_the_papers_noise"]:
        digits = 1 if row["batch_clip"] == 1.0 else 2 if row["batch_clip"] == 10.0 else 3
        assert f"**{row['certified_epsilon']:.{digits}f}**" in PAGE
        assert row["attained_epsilon"] <= row["certified_epsilon"]
    true = [
        (row["claimed_epsilon"], row["batch_clip"])
        for row in COMMITTED["certified_at_the_papers_noise"]
        if row["claim_holds"]
    ]
    assert true == [(1.0, 100.0)]


def test_the_gain_splits_into_accountant_and_theorem() -> None:
    found = claims.where_the_gain_comes_from()
    for row, committed in zip(found, COMMITTED["where_the_gain_comes_from"], strict=True):
        assert row == pytest.approx(committed, rel=1e-3)
        product = row["factor_of_the_accountant"] * row["factor_of_the_theorem"]
        assert product == pytest.approx(row["whole_factor"])
    assert [round(row["whole_factor"]) for row in found] == [318, 43]
    assert all(row["factor_of_the_accountant"] == pytest.approx(6.0, abs=0.05) for row in found)


def test_no_single_batch_clip_fits_the_remark() -> None:
    """ "5-7 %" at ε = 0.25: 100c fits ViT and GPT-2, and leaves BERT and RoBERTa at 13 %."""
    shares = COMMITTED["shuffled_over_unshuffled_at_0.25"]
    fits = {name: 0.05 <= by_clip["100"] <= 0.07 for name, by_clip in shares.items()}
    assert {name for name, fit in fits.items() if not fit} == {"BERT, SST-2", "RoBERTa, SST-2"}
    assert shares["BERT, SST-2"]["100"] == pytest.approx(0.13, abs=0.005)
    assert max(by_clip["1"] for by_clip in shares.values()) < 0.016


def test_fenton_wilkinson_depends_on_the_reading() -> None:
    committed = COMMITTED["fenton_wilkinson_distance"]
    assert committed["log-standard deviation 4"] == pytest.approx(0.40, abs=0.02)
    narrow = fig2.compute_at(fig2.SIGMA)["kolmogorov"]["fenton-wilkinson"]
    # Processors round differently: a few draws may fall on the other side of a point of the axis.
    few_draws = 3 / fig2.TRUTH_DRAWS
    assert narrow == pytest.approx(committed["log-standard deviation 0.25"], abs=few_draws)
    assert narrow < 0.01


def test_one_step_is_exact_and_the_file_has_a_command() -> None:
    assert claims.one_step() == pytest.approx(COMMITTED["one_step"])
    assert COMMITTED["one_step"]["closed_form"] == pytest.approx(24.378, abs=1e-3)
    assert "claims" in REPRODUCTIONS
