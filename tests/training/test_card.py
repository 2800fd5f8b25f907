"""The card: order, words, and verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from shuffled_dpsgd.integrations.trainer_files import with_privacy_section
from shuffled_dpsgd.reports import card_page
from shuffled_dpsgd.training import AuditedBound, PrivacyCard, PrivacyOptions, make_plan, write_card


def card(*, taken: int = 10, **changes: Any) -> PrivacyCard:
    settings: dict[str, Any] = {
        "dataset_size": 1000,
        "expected_batch_size": 100,
        "num_steps": 10,
        "delta": 1e-5,
        "epsilon": 1.0,
        "accounting": "paper",
        "batch_clip_norm": 1.0,
    }
    request = PrivacyOptions(**(settings | changes))
    plan = make_plan(request, sizes={"a": 10_000, "b": 10}, moved=frozenset({"a"}))
    return write_card(plan, num_steps=taken)


def certified_card(*, taken: int = 10) -> PrivacyCard:
    return card(accounting="certified", batch_clip_norm=None, taken=taken)


def bound(epsilon: float, delta: float = 1e-5) -> AuditedBound:
    return AuditedBound(
        adversary="axis sums",
        estimator="Clopper-Pearson",
        epsilon=epsilon,
        delta=delta,
        confidence=0.95,
    )


def test_claims_come_in_order_and_every_epsilon_has_its_word() -> None:
    text = str(card().with_audits(bound(3.0)))
    order = ["certified ε", "paper's estimate", "audited bounds", "verdict", "sampler"]
    positions = [text.index(label) for label in [*order, "threat model", "not covered"]]
    assert positions == sorted(positions)
    for line in text.splitlines():
        if "ε = " in line or "ε ≥ " in line:
            assert any(word in line for word in ("proven", "heuristic", "measured")), line


def test_the_paper_s_estimate_shows_what_it_depends_on() -> None:
    line = next(line for line in str(card()).splitlines() if "paper's estimate" in line)
    for part in ("heuristic", "c' = 1 c", "d = 10,000", "δ split 0.5", "not a guarantee"):
        assert part in line


@pytest.mark.parametrize("subject", ["hyper-parameter search", "pre-training data", "metrics"])
def test_what_is_not_covered_is_said(subject: str) -> None:
    assert any(subject in line for line in card().not_covered)


def test_an_audited_bound_above_a_claim_refutes_it() -> None:
    plain = card()
    assert plain.certified is not None
    assert plain.paper is not None
    assert plain.verdicts == {"certified": "not audited", "paper": "not audited"}
    between = plain.with_audits(bound(0.5), bound((plain.certified.epsilon + 1.0) / 2))
    assert between.verdicts["paper"] == "claim refuted"
    assert between.verdicts["certified"] == "consistent with the audit"
    above = plain.with_audits(bound(plain.certified.epsilon + 1.0))
    assert above.verdicts["certified"] == "claim refuted"


def test_a_bound_at_a_smaller_delta_refutes_nothing() -> None:
    assert card().with_audits(bound(1e3, delta=1e-9)).verdicts["paper"] == "not audited at this δ"


def test_json_keeps_the_kind_beside_every_epsilon() -> None:
    data = json.loads(card().with_audits(bound(3.0)).dumps())
    order = ["certified", "paper", "audits", "verdicts", "sampler"]
    assert sorted(order, key=list(data).index) == order
    assert {claim["kind"] for claim in data["paper_by_block"].values()} == {"heuristic"}
    assert data["certified"]["kind"] == "proven"
    assert data["paper"]["kind"] == "heuristic"
    assert data["audits"][0]["kind"] == "measured"


def test_it_says_how_many_samples_were_checked_and_that_none_differed() -> None:
    checked = replace(card(), samples_checked=4)
    assert "4 samples of the first batch and of batches chosen at random" in str(checked)
    assert "none differed" in str(checked)
    assert checked.to_json()["samples_checked"] == 4


def test_seeded_runs_warn_and_never_print_the_seed() -> None:
    seeded = card(seed=987_654_321)
    assert "whoever learns the seed" in str(seeded)
    assert "987654321" not in str(seeded) + seeded.dumps()
    assert "operating system" in str(card(seed=None))


def test_a_delta_that_protects_nobody_is_said() -> None:
    assert any("not below 1/1000" in line for line in card(delta=1e-3).not_covered)
    assert not any("not below" in line for line in card(delta=9e-4).not_covered)


def test_the_text_lists_every_assumption_and_whose_card_it_is() -> None:
    about = certified_card().about(model="bert-tiny", data="films", weights="ab12")
    text = str(about)
    assert about.use_assumptions
    for assumption in about.assumptions:
        assert assumption in text
    for word in ("bert-tiny", "films", "ab12"):
        assert word in text
    assert about.to_json()["subject"] == {"model": "bert-tiny", "data": "films", "weights": "ab12"}


def test_the_papers_estimate_is_small_print_under_certified_noise() -> None:
    assert certified_card().paper_is_small_print
    assert "small print" in str(certified_card())
    assert "small print" not in str(card())


def test_a_run_that_stopped_early_claims_its_plan() -> None:
    """The time of stopping may depend on the weights, and the claim of a prefix forgets that."""
    early, finished = certified_card(taken=3), certified_card()
    assert early.certified is not None
    assert early.certified == finished.certified
    assert early.paper == finished.paper
    assert early.certified_so_far is not None
    assert early.certified_so_far.epsilon < 0.8 * early.certified.epsilon
    assert early.exactness is None
    assert any(line.startswith("when the run stopped") for line in early.not_covered)
    assert "spent so far: ε = " in str(early)
    assert "spent so far" in card_page(early)
    assert early.to_json()["certified_so_far"]["epsilon"] == early.certified_so_far.epsilon


def test_a_finished_run_and_one_not_begun_have_no_word_about_stopping() -> None:
    nothing = certified_card(taken=0)
    assert nothing.certified is not None
    assert nothing.certified.epsilon == 0.0
    for each in (nothing, certified_card()):
        assert each.certified_so_far is None
        assert not any("stopped" in line for line in each.not_covered)
        assert "spent so far" not in str(each)


@pytest.mark.parametrize(
    ("noise", "clip", "private"),
    [(1.0, 1.0, True), (0.0, 1.0, False), (0.0, math.inf, False), (1.0, "none", False)],
)
def test_a_card_without_noise_or_clip_says_so(noise: float, clip: Any, private: bool) -> None:
    """Either is enough: noise beside unbounded gradients hides nobody, nor does a clip alone."""
    given = {"clip": "none"} if clip == "none" else {"clip_norm": clip}
    found = card(
        accounting="certified", batch_clip_norm=None, epsilon=None, noise_multiplier=noise, **given
    )
    assert found.private is private
    assert ("this run is not private" in str(found)) is not private


@pytest.mark.parametrize("taken", [1, 3, 10])
def test_what_epsilon_means_is_on_every_form_of_the_card_for_the_whole_plan(taken: int) -> None:
    """Also of a run that stopped early, whose claim is that of its plan."""
    stopped, finished = certified_card(taken=taken), certified_card()
    assert finished.certified is not None
    meaning = stopped.meaning
    assert meaning is not None
    assert meaning == finished.meaning
    assert meaning.add_remove.epsilon == finished.certified.epsilon
    assert meaning.replace_one.epsilon > meaning.add_remove.epsilon
    assert [k for k, _ in meaning.groups] == [2, 4, 8]
    assert stopped.to_json()["meaning"] == meaning.to_json()
    for text in (str(stopped), card_page(stopped), with_privacy_section("", stopped)):
        assert all(line in unescape(text) for line in meaning.describe())


def test_without_a_claim_there_is_nothing_to_explain() -> None:
    for each in (certified_card(taken=0), card(accounting=None, epsilon=None, noise_multiplier=0)):
        assert each.meaning is None
        assert each.to_json()["meaning"] is None
        assert "what it means" not in str(each)


def test_a_plan_for_replaced_records_says_what_adding_one_costs() -> None:
    replaced = card(
        accounting="certified", batch_clip_norm=None, adjacency="replace-one", epsilon=2.0
    )
    assert replaced.certified is not None
    assert replaced.meaning is not None
    assert replaced.meaning.replace_one.epsilon == replaced.certified.epsilon
    assert replaced.meaning.add_remove.epsilon < replaced.certified.epsilon
